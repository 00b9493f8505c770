# What scripts need to run programs on a port through VFIO. Sourced by main.sh.

# The port: in the only slot there is.
port=0000:01:00.0

# What programs said last, interrupts, and what the kernel has against the port.
evidence() {
    for evidence_file in /tmp/half.err /tmp/half.json /tmp/served /tmp/said /tmp/ping.err; do
        [ ! -s $evidence_file ] || sed "s|^|$evidence_file: |" $evidence_file | tail -n 12
    done
    grep vfio /proc/interrupts
    dmesg | grep -E 'DMAR|vfio|AER|pciehp' | tail -n 12
}

# vfio_bind [FUNCTION]: gives a PCI function to vfio-pci, whoever holds it.
vfio_bind() {
    vfio_function=/sys/bus/pci/devices/${1:-$port}
    echo vfio-pci >"$vfio_function/driver_override"
    [ ! -e "$vfio_function/driver" ] || echo "${1:-$port}" >"$vfio_function/driver/unbind"
    echo "${1:-$port}" >/sys/bus/pci/drivers_probe
    holds "vfio-pci does not take ${1:-$port}" [ "$(basename "$(readlink "$vfio_function/driver")")" = vfio-pci ]
}

# exits STATUS COMMAND...: the command ends with that status; what it says is in /tmp/said.
exits() {
    exits_wanted=$1 exits_got=0
    shift
    "$@" >/tmp/said 2>&1 || exits_got=$?
    [ $exits_got = "$exits_wanted" ] ||
        fail "$* ended with $exits_got, not $exits_wanted: $(tail -n 3 /tmp/said | tr '\n' ' ')"
}

# says WORDS: the last command of `exits` said so.
says() { grep -qF -e "$1" /tmp/said || fail "nothing about \"$1\" in: $(tr '\n' ' ' </tmp/said)"; }

# serve ARGUMENTS...: starts ntb-ping's answering end.
serve() {
    ntb-ping serve "$@" >/tmp/served 2>&1 &
    server=$!
}

# stop_serving: ends it as a user does, and it must end well.
stop_serving() {
    kill -INT "$server"
    stop_status=0
    wait "$server" || stop_status=$?
    holds "ntb-ping serve ended with $stop_status: $(tail -n 2 /tmp/served | tr '\n' ' ')" [ "$stop_status" = 0 ]
}

# ping_link NAME ARGUMENTS...: measures, hands the result over, and holds that nothing was lost, changed, or read across.
ping_link() {
    ping_name=$1 ping_status=0
    shift
    ntb-ping --json "$@" >/tmp/ping.json 2>/tmp/ping.err || ping_status=$?
    [ ! -s /tmp/ping.json ] || result "$ping_name" /tmp/ping.json
    holds "ntb-ping ended with $ping_status: $(tail -n 3 /tmp/ping.err | tr '\n' ' ')" [ $ping_status = 0 ]
    for ping_key in lost duplicated out_of_order corrupt; do
        holds "$ping_key" [ "$(field $ping_key /tmp/ping.json)" = 0 ]
    done
    holds "nothing was sent" [ "$(field received /tmp/ping.json)" -gt 0 ]
}

# no_remote_reads: nothing has been read across the link, either way, since the emulator was made.
no_remote_reads() {
    for way in a_to_b b_to_a; do
        holds "reads across the link, $way" [ "$(count $way.window_reads)" = 0 ]
    done
}

# start_half ARGUMENTS...: this guest's half of a campaign: traffic both ways, every message checked. Over the bridge, or
# over what `half_link` names.
start_half() {
    rm -f /tmp/input /tmp/half.err
    mkfifo /tmp/input
    campaign half "${half_link:-ntb:$port${VFIO:-}}" "$@" </tmp/input >/tmp/half.json 2>/tmp/half.err &
    half=$!
    exec 5>/tmp/input
}

# half_says WORD SECONDS: waits until it has said so.
half_heard() { grep -q -e "$1" -e violation /tmp/half.err; }
half_says() {
    within "$2" "the campaign does not say" half_heard "$1"
    ! grep violation /tmp/half.err >/tmp/said || fail "$(cat /tmp/said)"
}

# end_half NAME: both guests have messages still coming, end, and found nothing wrong.
end_half() {
    half_says "kills done" 150
    meet "$1-ends" 150
    echo >&5
    half_says 'flows 1' 60
    meet "$1-flows" 90
    exec 5>&-
    wait $half || true
    result "$1" /tmp/half.json
    holds "violations: $(cat /tmp/half.json)" [ "$(field passed /tmp/half.json)" = true ]
}

# start_inside COMMAND ARGUMENTS...: starts a command of lab-inside, which stops at places and waits to be sent on.
start_inside() {
    rm -f /tmp/inside.in /tmp/inside.err
    mkfifo /tmp/inside.in
    lab-inside "$@" </tmp/inside.in >/tmp/inside.json 2>/tmp/inside.err &
    inside=$!
    exec 6>/tmp/inside.in
}

# inside_at PLACE [SECONDS]: waits until it is there.
inside_there() { grep -q -x -e "$1" -e 'lab-inside: .*' /tmp/inside.err; }
inside_at() {
    within "${2:-60}" "lab-inside does not come to \"$1\"" inside_there "$1"
    ! grep lab-inside: /tmp/inside.err >/tmp/said || fail "$(cat /tmp/said)"
}

# inside_on: sends it on.
inside_on() { echo on >&6; }

# end_inside NAME: it ends, and everything held.
end_inside() {
    inside_status=0
    wait $inside || inside_status=$?
    exec 6>&-
    [ ! -s /tmp/inside.json ] || result "$1" /tmp/inside.json
    holds "lab-inside ended with $inside_status: $(cat /tmp/inside.json)" [ $inside_status = 0 ]
}
