# The campaigns over a software device for RDMA, both ends in this guest: each guest runs some of them.
device=${KIND}0
port=/sys/class/infiniband/$device/ports/1

evidence() {
    cat $port/state
    cat /tmp/out /tmp/err
}

own_address
rdma link add "$device" type "$KIND" netdev eth0
within 10 "the port is not active" grep -q ACTIVE $port/state

# campaign_holds NAME ARGUMENTS...: its result is handed over, and every rule has held.
campaign_holds() {
    campaign_name=$1
    shift
    campaign "$@" --link rdma >/tmp/out 2>/tmp/err || fail "$(tail -n 1 /tmp/out) $(tail -n 2 /tmp/err)"
    result "$campaign_name" /tmp/out
}

if [ "$ROLE" = a ]; then
    step hostile
    campaign_holds hostile hostile --rounds 5
    pass

    step faults
    campaign_holds faults faults --messages 20000 --seed "$SEED"
    pass
else
    step count
    campaign_holds count-oneway count --oneway --messages 5000 --ring 64
    campaign_holds count-pingpong count --pingpong --messages 500
    pass
fi
