# One guest runs the kernel's driver and clients, the other this project's program on vfio-pci.
#
# Settings: DRIVER   the kernel's module of the family
#           OURS     the guest with this project's program
#           PARTS    pingpong, perf, transport, or all
#           KILLED   no where the kernel does not come back after a program that was killed

device=$port
debug=/sys/kernel/debug
[ "$ROLE" = "$OURS" ] && ours=yes || ours=no
part() { [ "$PARTS" = all ] || [ "$PARTS" = "$1" ]; }

if [ $ours = no ]; then
    evidence() {
        grep -h -e Link -e DoorBell "$debug/$DRIVER/$device/info"
        grep -h -e 'rx_\|tx_\|Link\|RRI' $debug/ntb_transport/$device/qp*/stats
        ifconfig eth0 | grep packets
        dmesg | grep -i ntb | tail -n 12
    } 2>/dev/null
fi

at_least() { [ "$(cat "$1")" -ge "$2" ]; }
own_ip=10.9.8.2 kernel_ip=10.9.8.1

# start ARGUMENTS...: a program that goes on until it is told to end.
start() {
    ntb-ping linux "$@" >/tmp/served 2>&1 &
    server=$!
}
# ask NAME ARGUMENTS...: one that ends by itself, with a result in /tmp/ping.json.
ask() {
    ask_name=$1 ask_status=0
    shift
    ntb-ping linux "$@" --json >/tmp/ping.json 2>/tmp/ping.err || ask_status=$?
    [ ! -s /tmp/ping.json ] || result "$ask_name" /tmp/ping.json
    holds "ntb-ping ended with $ask_status: $(tail -n 3 /tmp/ping.err | tr '\n' ' ')" [ $ask_status = 0 ]
}

step bind
if [ $ours = yes ]; then
    vfio_bind
else
    load "$DRIVER"
    within 10 "the driver offers no NTB device" [ -e "/sys/bus/ntb/devices/$device" ]
    # AMD's driver reports the link again one second after it is loaded, and ntb_transport then begins anew.
    [ "$DRIVER" != ntb_hw_amd ] || sleep 2
fi
meet bound
pass

if part pingpong; then
    step pingpong
    if [ $ours = yes ]; then
        ask pingpong pingpong "ntb:$port" --count 30 --pause 20ms --timeout 60s
        holds "rings" [ "$(field heard /tmp/ping.json)" = 30 ]
        # The kernel's count goes on for as long as it is rung.
        holds "the peer's count" [ "$(field peer_count /tmp/ping.json)" -ge 20 ]
    else
        load ntb_pingpong delay_ms=20
        within 90 "the count does not advance" at_least "$debug/ntb_pingpong/$device/count" 20
    fi
    meet counted 120
    [ $ours = yes ] || rmmod ntb_pingpong
    meet pingpong-over
    pass
fi

if part perf; then
    step perf
    if [ $ours = yes ]; then
        ntb-ping linux perf "ntb:$port" --bytes 64KiB --hold 120s --timeout 90s --json >/tmp/ping.json 2>/tmp/ping.err &
        server=$!
        get ran 150 >/dev/null
        # Words overtake posted stores, and nothing of ntb_perf's reads behind them.
        sleep 3
        kill -INT $server
        perf_status=0
        wait $server || perf_status=$?
        holds "ntb-ping ended with $perf_status: $(tail -n 3 /tmp/ping.err | tr '\n' ' ')" [ $perf_status = 0 ]
        result perf /tmp/ping.json
        holds "bytes sent" [ "$(field sent_bytes /tmp/ping.json)" = 65536 ]
        holds "what the kernel wrote" [ "$(field written_here_bytes /tmp/ping.json)" = 65536 ]
        holds "commands" [ "$(field unknown_commands /tmp/ping.json)" = 0 ]
    else
        load ntb_perf total_order=16 chunk_order=14
        within 90 "ntb_perf does not reach its peer" sh -c "echo 0 >$debug/ntb_perf/$device/run"
        cat $debug/ntb_perf/$device/run >/tmp/perf
        note "perf $(tr '\n' ' ' </tmp/perf)"
        holds "no figure from ntb_perf" grep -q MBytes /tmp/perf
        put ran yes
    fi
    meet perf-over 120
    [ $ours = yes ] || rmmod ntb_perf
    meet perf-unloaded
    pass
fi

carrier() { [ "$(cat /sys/class/net/eth0/carrier 2>/dev/null)" = "$1" ]; }
# ping_ten ADDRESS: one at a time: the kernel's ping socket has room for one packet of this device's size.
ping_ten() {
    within 30 "no answer to ping" ping -c 1 -W 2 "$1"
    for n in 1 2 3 4 5 6 7 8 9 10; do
        holds "ping $n lost" ping -q -c 1 -W 10 "$1" >/tmp/pinged
    done
    note "$(tail -n 1 /tmp/pinged)"
}
# What another client left in the scratchpads is no greeting; see the scenarios of the kernel's drivers.
clear_scratchpads() {
    load ntb_tool
    n=0
    while [ -e "$debug/ntb_tool/$device/spad$n" ]; do
        echo 0 >"$debug/ntb_tool/$device/spad$n"
        n=$((n + 1))
    done
    rmmod ntb_tool
}

if part transport; then
    # The program asks the kernel's network stack.
    step ping
    ifconfig lo 127.0.0.1 up
    if [ $ours = yes ]; then
        ask ping ping "ntb:$port" --from $own_ip --to $kernel_ip --count 20 --size 500 --timeout 90s
        holds "round trips" [ "$(field received /tmp/ping.json)" = 20 ]
        holds "connections lost" [ "$(field connections_lost /tmp/ping.json)" = 0 ]
    else
        clear_scratchpads
        load ntb_transport
        load ntb_netdev
        ifconfig eth0 $kernel_ip netmask 255.255.255.0 up
    fi
    meet asked 120
    pass

    # The kernel's network stack asks the program.
    step answer
    if [ $ours = yes ]; then
        start echo "ntb:$port" --ip $own_ip
        get pinged 120 >/dev/null
        stop_serving
        note "$(tail -n 1 /tmp/served)"
    else
        within 60 "the network has no carrier" carrier 1
        ping_ten $own_ip
        put pinged yes
    fi
    meet answered
    pass

    start_tap() {
        start tap "ntb:$port" --name ntb0
        within 30 "there is no device" [ -e /sys/class/net/ntb0 ]
        ifconfig ntb0 $own_ip netmask 255.255.255.0 mtu 65000 up
    }
    step tap
    [ $ours = no ] || start_tap
    [ $ours = yes ] || within 60 "the network has no carrier" carrier 1
    meet joined 90
    [ $ours = yes ] || ping_ten $own_ip
    meet there
    [ $ours = no ] || ping_ten $kernel_ip
    meet back-again
    mkdir -p /tmp/www
    dd if=/dev/urandom of=/tmp/www/blob bs=65536 count=4 2>/dev/null
    [ $ours = yes ] && listen=$own_ip ask=$kernel_ip || listen=$kernel_ip ask=$own_ip
    httpd -p $listen:80 -h /tmp/www
    put blob "$(sha256sum </tmp/www/blob)"
    sum=$(get blob)
    fetch() {
        wget -q -O /tmp/fetched http://$ask/blob
        holds "checksum of what came by TCP" [ "$(sha256sum </tmp/fetched)" = "$sum" ]
    }
    meet served
    [ $ours = yes ] || fetch
    meet fetched-one 90
    [ $ours = no ] || fetch
    meet fetched-other 90
    pass

    # The kernel's interface goes down and up.
    told() { [ "$(grep -c "$1" /tmp/served)" -ge "$2" ]; }
    step closed
    if [ $ours = yes ]; then
        get down >/dev/null
        within 30 "the program does not notice" told 'disconnected: the peer closed' 1
        put noticed yes
        within 30 "the program does not connect again" told '^connected' 2
    else
        ifconfig eth0 down
        put down yes
        get noticed >/dev/null
        ifconfig eth0 $kernel_ip netmask 255.255.255.0 up
        within 60 "the network has no carrier again" carrier 1
        ping_ten $own_ip
    fi
    meet reopened 90
    pass

    # The program dies and another takes its place; nothing is cleaned up.
    if [ "${KILLED:-yes}" = yes ]; then
    step killed
    if [ $ours = yes ]; then
        kill -KILL $server
        wait $server || true
        get lost 60 >/dev/null
        start_tap
    else
        within 60 "the loss of the peer is not seen" carrier 0
        put lost yes
        within 60 "the network has no carrier again" carrier 1
        ping_ten $own_ip
    fi
    meet alive 90
    pass
    fi
    [ $ours = no ] || stop_serving
    meet over
fi

step unload
if [ $ours = no ]; then
    ! part transport || rmmod ntb_netdev ntb_transport
    rmmod "$DRIVER"
fi
pass
