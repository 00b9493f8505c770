# Links over a software device for RDMA, both ends in this guest.
device=${KIND}0
port=/sys/class/infiniband/$device/ports/1

evidence() {
    ls /dev/infiniband /sys/class/infiniband
    cat $port/state
    rdma link
    cat /tmp/out
}

# refused NEEDLE: opening a link fails, with the reason.
refused() {
    refused_needle=$1
    shift
    if "$@" campaign conformance --link rdma >/tmp/out 2>&1; then
        fail "a link was opened though it cannot be"
    fi
    grep -q "$refused_needle" /tmp/out || fail "the reason is not \"$refused_needle\": $(tail -n 1 /tmp/out)"
}

own_address

step none
refused "RDMA unavailable: no RDMA device" env
pass

rdma link add "$device" type "$KIND" netdev eth0
within 10 "the port is not active" grep -q ACTIVE $port/state

step provider
mv /etc/libibverbs.d /etc/hidden
refused "no provider library drives it" env
mv /etc/hidden /etc/libibverbs.d
pass

step memlock
chmod 666 /dev/infiniband/*
chmod 1777 /tmp
refused "ulimit -l" sh -c 'ulimit -l 16; exec lab-inside as-user 1000 "$@"' limited
pass

step conformance
campaign conformance --link rdma >/tmp/out 2>&1 || fail "$(tail -n 1 /tmp/out)"
pass

step kill
campaign kill --link rdma --rounds 6 >/tmp/out 2>&1 || fail "$(tail -n 1 /tmp/out)"
pass
