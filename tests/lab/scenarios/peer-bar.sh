# Guest a opens a window onto the BAR of a second device, as onto a GPU's memory; guest b's message lands there.

step bind
vfio_bind
if [ "$ROLE" = a ]; then
    # Shared memory between virtual machines: a prefetchable BAR 2 with memory behind it.
    for function in /sys/bus/pci/devices/*; do
        [ "$(cat "$function/vendor")$(cat "$function/device")" != 0x1af40x1110 ] || second=${function##*/}
    done
    holds "the second device is there" [ -n "${second:-}" ]
    vfio_bind "$second"
fi
meet bound
pass

step message
if [ "$ROLE" = a ]; then
    start_inside bar-receive ntb:$port ntb:$second --seed "$SEED"
    inside_at "window open"
    meet open
    inside_at proven 90
    meet proven 90
    inside_on
    inside_at received 90
    put received yes
else
    start_inside bar-send ntb:$port --seed "$SEED"
    inside_at "link up"
    meet open
    inside_on
    inside_at "pattern stored" 90
    meet proven 90
    inside_on
    inside_at sent 90
    get received 90 >/dev/null
fi
for way in a_to_b b_to_a; do
    holds "stores beyond the BAR" [ "$(count $way.fault_unmapped)$(count $way.fault_unreachable)" = 00 ]
done
pass

# next_round PLACE: guest a comes to the place, guest b stores the next pattern, and guest a goes on.
round=0
next_round() {
    round=$((round + 1))
    if [ "$ROLE" = a ]; then
        inside_on
        inside_at "$1" 60
        meet "at-$round" 90
        get "stored-$round" 90 >/dev/null
    else
        meet "at-$round" 90
        inside_on
        inside_at "round $round" 90
        # What was posted has arrived: a count comes after it.
        count b_to_a.fault_unmapped >/dev/null
        put "stored-$round" yes
    fi
}

# Guest a's second device stops decoding its BAR, which is told, and goes on.
step decoding
next_round "open again"
pass

step reset
next_round reset
pass

# The I/O mapping is taken away under an open window.
step unmapped
next_round "window onto nothing"
holds "no store was refused" [ "$(count b_to_a.fault_unmapped)" -gt 0 ]
meet counted
inside_on
end_inside trouble
pass
