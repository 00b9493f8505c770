# A guest is reset, and its power is cut, in the middle of traffic; the other one's program lives through it.

boots=$(boots)
step bind
vfio_bind
pass

step first-traffic
start_half --seed 1
half_says traffic 90
put traffic yes
[ "$ROLE" = a ] || get traffic >/dev/null
pass

if [ "$ROLE" = a ] && [ "$boots" -lt 2 ]; then
    # What comes next is done to this guest.
    sleep 150
    fail "nobody touches this guest"
fi

if [ "$ROLE" = b ]; then
    step reset
    machine a reset
    get traffic 90 >/dev/null
    holds "reset in mid-traffic: the survivor" kill -0 $half
    pass

    step power-cut
    machine a off
    sleep 1
    holds "power cut in mid-traffic: the survivor" kill -0 $half
    machine a on
    get traffic 90 >/dev/null
    pass
fi

step last-traffic
end_half last
[ "$ROLE" = a ] || holds "lives of the survivor" [ "$(field lives /tmp/half.json)" -ge 3 ]
no_remote_reads
pass
