# Links over a software device for RDMA between the two guests.
device=${KIND}0
port=/sys/class/infiniband/$device/ports/1
export NTB_SECRET=of-the-lab

evidence() {
    for evidence_file in /tmp/half.err /tmp/half.json /tmp/served /tmp/said /tmp/ping.err /tmp/latency; do
        [ ! -s $evidence_file ] || sed "s|^|$evidence_file: |" $evidence_file | tail -n 12
    done
    cat $port/state
    ip addr show eth0
    grep . $port/gids/[0-9] $port/gid_attrs/types/[0-9]
    dmesg | tail -n 8
}

# gid: index of the RoCE v2 entry of this guest's IPv4 address; 0 over iWARP.
gid() {
    [ "$KIND" = rxe ] || { echo 0; return; }
    gid_hex=$(printf '0a09:07%02x' $own_number)
    for gid_entry in "$port"/gids/*; do
        if grep -q "ffff:$gid_hex" "$gid_entry" && grep -q v2 "$port/gid_attrs/types/${gid_entry##*/}"; then
            echo "${gid_entry##*/}"
            return
        fi
    done
    fail "the device has no GID of this guest's address"
}

# served: answers while the other guest measures.
served() {
    serve "$1"
    meet "served-$STEP"
    get measured 120 >/dev/null
    stop_serving
}

own_address
ifconfig lo up
rdma link add "$device" type "$KIND" netdev eth0
within 10 "the port is not active" grep -q ACTIVE $port/state
address=rdma:10.9.7.1:7471
half_link=$address
meet ready

step ping
if [ "$ROLE" = a ]; then
    served "$address"
else
    meet "served-$STEP"
    ping_link ping "$address" --count 1000
    cp /tmp/ping.json /tmp/ping-first.json
    put measured yes
fi
pass

if [ "$ROLE" = a ]; then
    STEP=options
    served "$address"
else
    step options
    meet "served-$STEP"
    # Packets are iWARP's own matter.
    [ "$KIND" = rxe ] && packets=,mtu=512 words="packets of 512 bytes" || packets= words="packets as large"
    ping_link options "$address,device=$device,port=1,gid=$(gid),tc=104$packets,inline=128,depth=64,timeout=12,retries=5" --count 200
    put measured yes
    for word in "by $device port 1" "$words" "traffic class 104" "inline 128 bytes" "64 requests under way" \
        "time-out 12 with 5 retries"; do
        grep -q "$word" /tmp/ping.json || fail "nothing about \"$word\" in $(field reason /tmp/ping.json)"
    done
    pass
fi

# latency ARGUMENTS...: ib_write_lat, with the same number of bytes, carried by requests themselves.
latency() {
    [ "$KIND" = rxe ] && latency_by="-x $(gid)" || latency_by=-R
    # shellcheck disable=SC2086 # two words
    ib_write_lat -F -d "$device" -i 1 $latency_by -s 64 -I 64 -n 1000 "$@" >/tmp/latency 2>&1
}
if [ "$ROLE" = a ]; then
    STEP=ratio
    meet latency
    latency
    get compared >/dev/null
else
    step ratio
    meet latency
    within 40 "ib_write_lat does not get through" latency 10.9.7.1
    # Typical latency of one way, in us.
    one_way=$(awk '$1 == 64 { print $5 }' /tmp/latency)
    awk -v ours="$(field p50 /tmp/ping-first.json)" -v one_way="$one_way" 'BEGIN {
        printf "{\"rtt_p50_us\": %.1f, \"ib_write_lat_round_trip_us\": %.1f, \"ratio\": %.2f}\n",
            ours / 1000, 2 * one_way, ours / 2000 / one_way }' >/tmp/ratio.json
    result ratio /tmp/ratio.json
    note "round trip against ib_write_lat: $(cat /tmp/ratio.json)"
    put compared yes
    pass
fi

# Both ends choose, and what they choose is RDMA: it is tried before it is settled on.
step auto
if [ "$ROLE" = a ]; then
    served auto:10.9.7.1:7490
else
    meet "served-$STEP"
    ping_link auto auto:10.9.7.1:7490 --count 200 --timeout 60s
    put measured yes
    holds "not RDMA: $(field reason /tmp/ping.json)" grep -q '"kind": *"rdma"' /tmp/ping.json
fi
pass

step kill
[ "$ROLE" = a ] && kills=0 || kills=3
start_half --seed "$SEED" --kills $kills
end_half kill
pass
