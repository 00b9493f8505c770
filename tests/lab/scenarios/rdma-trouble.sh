# The network under a link over RDMA goes away, comes back and gets other addresses, between two guests under traffic.
device=${KIND}0
port=/sys/class/infiniband/$device/ports/1
export NTB_SECRET=of-the-lab

evidence() {
    sed "s|^|half: |" /tmp/half.err | tail -n 30
    cat $port/state
    ip addr show eth0
    grep . $port/gids/[0-9]
    dmesg | tail -n 8
}

# flows: messages come in both guests.
flown=0
flows() {
    flown=$((flown + 1))
    echo >&5
    half_says "flows $flown" 60
    meet "flows-$flown" 90
}

# told NAME: the link has told of it since the last time that this was asked.
told_until=0
told() {
    tail -n +$((told_until + 1)) /tmp/half.err | grep -q " $1: " || fail "nothing was told of \"$1\""
}
listen_on() { told_until=$(wc -l </tmp/half.err); }

own_address
ifconfig lo up
rdma link add "$device" type "$KIND" netdev eth0
within 10 "the port is not active" grep -q ACTIVE $port/state
half_link=rdma:10.9.7.1:7471
meet ready

step traffic
start_half --seed "$SEED"
half_says traffic 90
flows
pass

# The caller's interface, then that of the side which is called.
step port
for cut in b a; do
    listen_on
    if [ "$ROLE" = $cut ]; then
        ifconfig eth0 down
        within 5 "the port stays active" grep -q DOWN $port/state
        sleep 2
        ifconfig eth0 up
    fi
    meet "up-$cut"
    flows
    [ "$ROLE" != $cut ] || { told rdma-port-down; told rdma-port-up; }
    told link-lost
done
pass

# The caller gets another address in place of the one that its connection uses.
step address
listen_on
if [ "$ROLE" = b ]; then
    ifconfig eth0 10.9.7.12 netmask 255.255.255.0
fi
meet moved
flows
told link-lost
[ "$ROLE" = a ] || told rdma-address-changed
pass

step end
exec 5>&-
wait $half || true
result trouble /tmp/half.json
holds "violations: $(cat /tmp/half.json)" [ "$(field passed /tmp/half.json)" = true ]
pass
