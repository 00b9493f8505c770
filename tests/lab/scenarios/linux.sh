# Both guests run the kernel's own drivers and clients on one emulated pair.
#
# Settings: DRIVER   module of the family
#           MASKS    yes where the hardware can mask doorbells
#           SIDED    yes where the two ends have different port numbers
#           LINK     how one side takes the link down: `client` (its link control) or `driver` (by unloading)

device=0000:01:00.0
debug=/sys/kernel/debug
tool=$debug/ntb_tool/$device

evidence() {
    grep -h -e Link -e DoorBell -e 'rx_\|tx_' "$debug/$DRIVER/$device/info" $debug/ntb_transport/$device/qp*/stats
    for n in 0 1 2 3 4 5 6 7; do
        [ -e "$tool/spad$n" ] && echo "spad$n $(cat "$tool/spad$n")"
    done
    ifconfig eth0 | grep packets
} 2>/dev/null

# in_turn COMMAND...: first in guest a, then in guest b.
in_turn() {
    [ "$ROLE" = a ] || get turn 120 >/dev/null
    "$@"
    put turn yours
    [ "$ROLE" = b ] || get turn 120 >/dev/null
}

# One client after the other: what is loaded next meets a peer that has let go of the last one too.
unload_client() {
    rmmod "$@"
    meet unloaded
}

bind_driver() {
    load "$DRIVER"
    within 10 "the driver offers no NTB device" [ -e "/sys/bus/ntb/devices/$device" ]
    # AMD's driver reports the link again from a timer, one second after it is loaded. An ntb_transport that has
    # begun to send by then resets its ring a second time, and its peer waits for ever.
    [ "$DRIVER" != ntb_hw_amd ] || sleep 2
}

reads() { [ "$(cat "$1")" = "$2" ]; }
at_least() { [ "$(cat "$1")" -ge "$2" ]; }

# The clients ask for the link on both sides; AMD's secondary side answers that with an error, which they ignore.
want_link() { echo "$1" >"$tool/link" || [ "$DRIVER" = ntb_hw_amd ]; }
link_is() { within 30 "the link is not $1" reads "$tool/peer0/link" "$1"; }

# Interrupts that the device has raised here so far.
interrupts() { awk -v device="$device" '$0 ~ "MSIX?-" device { sum += $2 } END { print sum + 0 }' /proc/interrupts; }
at_least_interrupts() { [ "$(interrupts)" -ge "$1" ]; }

step probe
bind_driver
load ntb_tool
holds "ntb_tool did not take the device" [ -d "$tool" ]
meet probe
pass

step ports
own=$(cat "$tool/port") other=$(cat "$tool/peer0/port")
if [ "$SIDED" = yes ]; then
    # Guest a has the upstream or primary end, which is port 0.
    [ "$ROLE" = a ] && expected="0 1" || expected="1 0"
else
    expected="0 0"
fi
holds "port numbers" [ "$own $other" = "$expected" ]
pass

step link-up
# AMD's hardware driver announces itself when it is loaded; the others wait for a client to ask.
[ "$LINK" = driver ] || holds "the link is up before anyone asked" reads "$tool/peer0/link" N
meet link-down
want_link Y
link_is Y
meet link-up
pass

# Every scratchpad of the other side, each with a value of its own.
step scratchpads
[ "$ROLE" = a ] && mine=0xa1000000 theirs=0xb1000000 || mine=0xb1000000 theirs=0xa1000000
n=0
while [ -e "$tool/peer0/spad$n" ]; do
    echo $((mine + n)) >"$tool/peer0/spad$n"
    holds "scratchpad $n of the other side" reads "$tool/peer0/spad$n" "$(printf '0x%x' $((mine + n)))"
    n=$((n + 1))
done
holds "scratchpads" [ $n -ge 8 ]
note "$n scratchpads"
meet scratchpads
while [ $n -gt 0 ]; do
    n=$((n - 1))
    holds "scratchpad $n" reads "$tool/spad$n" "$(printf '0x%x' $((theirs + n)))"
done
meet scratchpads-read
pass

# Every doorbell alone: seen by the other side, with an interrupt and nothing beside it, and cleared.
ring_all() {
    bit=1
    while [ $((bit & valid)) -ne 0 ]; do
        echo "s $bit" >"$tool/peer_db"
        meet heard
        bit=$((bit << 1))
    done
}
hear_all() {
    bit=1 raised=$(interrupts)
    meet listening
    while [ $((bit & valid)) -ne 0 ]; do
        raised=$((raised + 1))
        within 10 "doorbell $bit" reads "$tool/db" "$(printf '0x%x' $bit)"
        within 10 "no interrupt of doorbell $bit" at_least_interrupts $raised
        echo "c $bit" >"$tool/db"
        holds "doorbell $bit does not clear" reads "$tool/db" 0x0
        meet heard
        bit=$((bit << 1))
    done
}
step doorbells
valid=$(($(cat "$tool/db_valid_mask")))
note "doorbells $(cat "$tool/db_valid_mask")"
echo "c $valid" >"$tool/db"
[ "$MASKS" = no ] || echo "c $valid" >"$tool/db_mask"
if [ "$ROLE" = a ]; then
    meet listening; ring_all; hear_all
else
    hear_all; meet listening; ring_all
fi
pass

# A doorbell that arrives while masked raises its interrupt when it is unmasked.
if [ "$MASKS" = yes ]; then
    step doorbell-mask
    echo "s 1" >"$tool/db_mask"
    before=$(interrupts)
    meet masked
    echo "s 1" >"$tool/peer_db"
    meet rung
    within 10 "a masked doorbell is not recorded" reads "$tool/db" 0x1
    holds "a masked doorbell raises an interrupt" [ "$(interrupts)" = "$before" ]
    echo "c 1" >"$tool/db_mask"
    within 10 "unmasking raises no interrupt" at_least_interrupts $((before + 1))
    echo "c 1" >"$tool/db"
    holds "doorbell does not clear" reads "$tool/db" 0x0
    meet unmasked
    pass
fi

# What one side writes into a window lies in the other's memory, and nothing passes the end of what is exposed.
chunk=4096
exposed=32768
fill() { dd if=/dev/urandom of=/tmp/sent bs=$chunk count=$(($1 / chunk)) 2>/dev/null; }
check_window() {
    window=$1
    meet "window$window-open"
    over=$((exposed + chunk))
    # Where translations are as coarse as the BAR, there is nothing beyond the end to try.
    [ "$alignment" -le $exposed ] || over=$exposed
    echo "0:$over" >"$tool/peer0/peer_mw_trans$window"
    fill $over
    dd if=/tmp/sent of="$tool/peer0/peer_mw$window" bs=$chunk conv=notrunc 2>/dev/null
    # The read comes first: it pushes the posted writes ahead of it, where words to the other guest overtake them.
    dd if="$tool/peer0/peer_mw$window" of=/tmp/read bs=$chunk count=$((over / chunk)) 2>/dev/null
    sum=$(head -c $exposed /tmp/sent | sha256sum)
    holds "window $window: what was written reads back" [ "$(head -c $exposed /tmp/read | sha256sum)" = "$sum" ]
    put written "$sum"
    holds "window $window: what was written arrives" [ "$(get arrived)" = "$sum" ]
    if [ $over -gt $exposed ]; then
        beyond=$(tail -c $chunk /tmp/read | tr -d '\377' | wc -c)
        holds "window $window: memory beyond its end answers" [ "$beyond" = 0 ]
    fi
    echo 0:0 >"$tool/peer0/peer_mw_trans$window" || true
    meet "window$window-read"
}
expose_window() {
    window=$1
    echo $exposed >"$tool/peer0/mw_trans$window"
    meet "window$window-open"
    get written >/dev/null
    put arrived "$(head -c $exposed "$tool/peer0/mw$window" | sha256sum)"
    meet "window$window-read"
    echo 0 >"$tool/peer0/mw_trans$window"
}
step windows
windows=0
while [ -e "$tool/peer0/mw_trans$windows" ]; do
    alignment=$(($(awk '/^Alignment/ { print $2 }' "$tool/peer0/mw_trans$windows")))
    [ "$ROLE" = a ] && check_window $windows || expose_window $windows
    [ "$ROLE" = b ] && check_window $windows || expose_window $windows
    windows=$((windows + 1))
done
holds "windows" [ $windows -gt 0 ]
note "$windows windows, alignment $alignment"
meet windows
pass

if [ "$LINK" = client ]; then
    step link-down
    [ "$ROLE" = b ] || want_link N
    link_is N
    meet down-a
    [ "$ROLE" = b ] || want_link Y
    link_is Y
    meet up-a
    pass

    step cable
    [ "$ROLE" = a ] || bridge link down
    link_is N
    meet out
    [ "$ROLE" = a ] || bridge link up
    link_is Y
    meet in
    pass
fi
unload_client ntb_tool

step pingpong
meet pingpong
load ntb_pingpong delay_ms=20
within 40 "the count does not advance" at_least "$debug/ntb_pingpong/$device/count" 20
meet counted
unload_client ntb_pingpong
pass

perf=$debug/ntb_perf/$device
run_perf() {
    within 60 "ntb_perf does not reach its peer" sh -c "echo 0 >$perf/run"
    cat $perf/run >/tmp/perf
    note "perf $(tr '\n' ' ' </tmp/perf)"
    holds "no figure from ntb_perf" grep -q MBytes /tmp/perf
}
step perf
load ntb_perf total_order=18 chunk_order=14
in_turn run_perf
meet perf
unload_client ntb_perf
pass

[ "$ROLE" = a ] && own_ip=10.9.8.1 peer_ip=10.9.8.2 || own_ip=10.9.8.2 peer_ip=10.9.8.1
carrier() { [ "$(cat /sys/class/net/eth0/carrier 2>/dev/null)" = "$1" ]; }
# What the last client left in the scratchpads is no greeting of ntb_transport. It clears them itself where it
# finds the link down; AMD's is up from the start, and a stale queue pair bit makes it send before its peer has
# set up the ring, which then waits for ever for the frame that was wiped.
clear_scratchpads() {
    load ntb_tool
    n=0
    while [ -e "$tool/spad$n" ]; do
        echo 0 >"$tool/spad$n"
        n=$((n + 1))
    done
    rmmod ntb_tool
}
network_up() {
    load ntb_transport
    load ntb_netdev
    ifconfig eth0 $own_ip netmask 255.255.255.0 up
    within 60 "the network has no carrier" carrier 1
}
step netdev
clear_scratchpads
meet clear
ifconfig lo 127.0.0.1 up
network_up
meet network
# Guests in turn, one request at a time: ping's socket has room for one packet of this device's size, takes the
# other side's requests too, and drops what comes in a bunch after a pause of a busy machine.
ping_peer() {
    within 20 "no answer to ping" ping -c 1 -W 2 $peer_ip
    for n in 1 2 3 4 5 6 7 8 9 10; do
        holds "ping $n lost" ping -q -c 1 -W 10 $peer_ip >/tmp/ping
    done
    note "$(tail -n 1 /tmp/ping)"
}
in_turn ping_peer
meet pinged
pass

# A megabyte each way by TCP, compared by checksum.
step tcp
mkdir -p /tmp/www
dd if=/dev/urandom of=/tmp/www/blob bs=65536 count=16 2>/dev/null
httpd -p $own_ip:80 -h /tmp/www
put blob "$(sha256sum </tmp/www/blob)"
sum=$(get blob)
fetch() {
    wget -q -O /tmp/fetched http://$peer_ip/blob
    holds "checksum of what came by TCP" [ "$(sha256sum </tmp/fetched)" = "$sum" ]
}
in_turn fetch
meet fetched
pass

# One side goes away and comes back under the other's nose.
step transport-reload
if [ "$ROLE" = a ]; then
    rmmod ntb_netdev ntb_transport
    # Where a client cannot take the link down, the peer's ntb_transport would not greet a new one.
    [ "$LINK" = client ] || rmmod "$DRIVER"
    meet gone
    [ "$LINK" = client ] || bind_driver
    clear_scratchpads
    network_up
else
    within 60 "the loss of the peer is not seen" carrier 0
    meet gone
    within 60 "the network has no carrier again" carrier 1
fi
meet back
in_turn ping_peer
meet pinged-again
unload_client ntb_netdev ntb_transport
pass

# The hardware driver too, in one guest, then in the other.
step driver-reload
load ntb_tool
meet tools
want_link Y
link_is Y
meet reload
reload() {
    rmmod ntb_tool "$DRIVER"
    put driver gone
    get driver-seen >/dev/null
    bind_driver
    load ntb_tool
    want_link Y
    link_is Y
}
watch_reload() {
    get driver >/dev/null
    link_is N
    put driver-seen yes
    link_is Y
}
[ "$ROLE" = a ] && reload || watch_reload
meet reload-b
[ "$ROLE" = b ] && reload || watch_reload
meet reloaded
pass

step unload
rmmod ntb_tool "$DRIVER"
pass
