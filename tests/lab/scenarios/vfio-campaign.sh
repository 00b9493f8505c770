# Processes are killed and the cable is pulled under full traffic, with choices of a fixed seed and of a random one.
#
# Settings: VFIO   what stands behind the port's address: nothing, or ,iommufd

# flap SEED TIMES: pulls the cable for so long and so often as the seed says.
flap() {
    for flap_pause in $(awk -v seed="$1" -v times="$2" 'BEGIN {
        srand(seed); for (n = 0; n < times; n++) printf "%.2f:%dms\n", 0.1 + rand(), 1 + rand() * 400 }'); do
        sleep "${flap_pause%:*}"
        bridge link flap "${flap_pause#*:}"
    done
}

note "random seed $SEED"
step bind
vfio_bind
meet bound
pass

# One side's process dies again and again.
step kill
[ "$ROLE" = a ] && kills=6 || kills=0
start_half --seed 1 --kills $kills
end_half kill
pass

# Both at once.
step kill-random
start_half --seed "$SEED" --kills 4
end_half kill-random
pass

step flap
before=$(count a.link_downs)
start_half --seed 1
half_says traffic 60
meet traffic
[ "$ROLE" = a ] || { flap 1 5; flap "$SEED" 5; }
end_half flap
holds "the cable was not pulled" [ "$(count a.link_downs)" -ge $((before + 5)) ]
holds "the traffic has one life" [ "$(field lives /tmp/half.json)" -gt 2 ]
pass

step no-remote-reads
no_remote_reads
pass
