# Guest b stores everywhere it can reach; guest a's memory outside the window keeps its guards.
#
# Settings: FINE   yes where windows are translated more finely than the BAR is large

step bind
vfio_bind
meet bound
pass

# The window refuses: nothing but what is exposed changes, and all of that does.
step window
if [ "$ROLE" = a ]; then
    start_inside victim ntb:$port
    inside_at "window open"
    meet open
    get written >/dev/null
    inside_on
    inside_at "window wrong"
else
    start_inside hostile ntb:$port --seed "$SEED"
    inside_at "link up"
    meet open
    inside_on
    inside_at written 90
    put written yes
fi
[ "$FINE" = no ] || holds "stores beyond the window" [ "$(count b_to_a.outside_window)" -gt 0 ]
pass

# A window onto addresses that were never given out: the IOMMU refuses, and its kernel says so.
step iommu
if [ "$ROLE" = a ]; then
    meet wrong
    get written >/dev/null
    inside_on
    inside_at closed
    holds "no store was refused by the IOMMU" [ "$(count b_to_a.fault_unmapped)" -gt 0 ]
    within 20 "the kernel has logged no fault" sh -c 'dmesg | grep -q "DMAR:.*fault"'
    note "$(dmesg | grep 'DMAR:.*fault' | head -n 1)"
else
    meet wrong
    inside_on
    inside_at "written again" 90
    put written yes
fi
meet refused
pass

# Registers too, whatever they are.
step registers
if [ "$ROLE" = b ]; then
    inside_on
    end_inside hostile
    put scribbled yes
else
    get scribbled 90 >/dev/null
    inside_on
    end_inside victim
fi
pass

# ntb-check reports the faults of this port, which nobody holds any more.
step report
if [ "$ROLE" = a ]; then
    check_status=0
    ntb-check --json $port >/tmp/check.json || check_status=$?
    result check /tmp/check.json
    holds "ntb-check ended with $check_status" [ $check_status = 0 ]
    holds "ntb-check does not report the faults" grep -q '"iommu-faults"' /tmp/check.json
fi
meet over
pass
