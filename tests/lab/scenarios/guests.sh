# Guests without a bridge: what every other scenario takes for granted.

boots=$(boots)

# Guest b again, after what guest a does to it at the end.
if [ "$boots" -gt 0 ]; then
    step power
    put born "$boots"
    [ "$boots" = 2 ] || get end-of-this-boot
    pass
    finish
fi

step modules
for module in ntb_hw_intel ntb_hw_amd ntb_hw_epf ntb_pingpong ntb_tool ntb_perf ntb_transport; do
    load $module
done
pass

groups=$(ls /sys/kernel/iommu_groups | wc -l)
if [ "$ROLE" = a ]; then
    step no-iommu
    holds "IOMMU groups without an IOMMU" [ "$groups" = 0 ]
else
    step iommu
    holds "no IOMMU groups" [ "$groups" -gt 0 ]
fi
pass

step words
put greeting "from $ROLE to $PEER"
holds "the other guest's words" [ "$(get greeting)" = "from $PEER to $ROLE" ]
meet end
pass

step programs
ping_link soft --count 1000 --warmup 10
holds "a field of the result" [ "$(field tool /tmp/ping.json)" = ntb-ping ]
exits 2 ntb-ping --count 0
says "--count"
rdma link show
pass

step network
peer=$(own_address)
meet addresses
ping -q -c 3 $peer
meet pinged
pass

step power
if [ "$ROLE" = a ]; then
    # What guest b has passed is reported by now.
    get victim
    machine b reset
    holds "a reset guest's count of boots" [ "$(get born)" = 1 ]
    machine b off
    machine b on
    holds "a restarted guest's count of boots" [ "$(get born)" = 2 ]
    pass
else
    put victim ready
    get end-of-this-boot
fi
