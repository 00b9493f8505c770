# What every scenario's script can use. Sourced with -e: a command that fails ends the guest and the step.
#
# Lines to the lab:   begin STEP | pass STEP | note TEXT | fail STEP: WHY | result NAME JSON | put KEY VALUE | done
#                     bridge ACTION | count PATH | machine ROLE ACTION | boots
# Lines from the lab: put KEY VALUE, as the other guest said it; put bridge VALUE, put count VALUE, put machine VALUE,
#                     put boots VALUE, as answers to these; abort, when the other guest has failed
set -eu

STEP=start

say() { echo "$*" >&3; }
note() { say "note $*"; }

# step NAME: what follows, up to `pass`, proves NAME.
step() { STEP=$1; say "begin $STEP"; echo "lab: begin $STEP" >/dev/kmsg; }
pass() { say "pass $STEP"; STEP="after $STEP"; }

# fail WHY: this guest can not go on.
fail() {
    trap - EXIT
    set +ex
    evidence 2>&1 | tail -n 60 | while read -r line; do note "evidence $line"; done
    say "fail $STEP: $*"
    echo "lab: fail $STEP: $*" >/dev/kmsg
    # The other guest says first what it sees, with this one still there.
    sleep 3
    poweroff -f
}

# evidence: prints what a reader of a failure should see; a scenario's script has its own.
evidence() { :; }

unexpected_end() {
    tail -n 6 /tmp/trace | while read -r line; do note "trace $line"; done
    fail "a command failed (status $1)"
}
trap 'unexpected_end $?' EXIT

# put KEY VALUE...: tells the other guest. A later value replaces an earlier one.
put() { say "put $*"; }

# get KEY [SECONDS]: waits for the other guest's value, prints it and forgets it.
get() {
    get_key=$1 get_limit=${2:-60}
    while [ ! -e "/run/mail/$get_key" ]; do
        IFS=' ' read -r -t "$get_limit" get_verb get_name get_value <&3 ||
            fail "the other guest did not say \"$get_key\" within $get_limit s"
        [ "$get_verb" != abort ] || fail "the other guest failed"
        echo "$get_value" >"/run/mail/$get_name"
    done
    cat "/run/mail/$get_key"
    rm "/run/mail/$get_key"
}

# meet NAME [SECONDS]: returns when both guests are here.
meet() {
    put "$1" here
    get "$1" "${2:-60}" >/dev/null
}

# bridge ACTION: what no guest can do itself, in the words of an emulator scenario: `link down` pulls the cable.
bridge() {
    say "bridge $*"
    bridge_answer=$(get bridge)
    [ "$bridge_answer" = done ] || fail "the emulator: $*: $bridge_answer"
}

# machine ROLE ACTION: what somebody does who stands in front of guest ROLE.
#   reset    the button; it boots anew and runs the script from the start: see boots
#   off, on  cuts its power; switches it on again
#   unplug   asks for the port's slot, as the button beside it does; plug puts a port there
#   qmp JSON any command of QEMU
machine() {
    say "machine $*"
    machine_answer=$(get machine)
    [ "$machine_answer" = done ] || fail "machine $*: $machine_answer"
}

# boots: how often this guest was reset or switched on again.
boots() {
    say boots
    get boots
}

# count PATH: a count of the emulator, such as a_to_b.window_reads.tlps; docs/emulator.md has the names.
count() {
    say "count $*"
    get count
}

# result NAME FILE: hands a program's JSON over to whoever reads the lab's results.
result() { say "result $1 $(tr -d '\n' <"$2")"; }

# field NAME FILE: the first value of that name in JSON; a number, a word or a text without quotes in it.
field() {
    tr -d '\n' <"$2" | grep -o "\"$1\": *\(\"[^\"]*\"\|[^,}]*\)" | head -n 1 | sed 's/^[^:]*: *//; s/^"//; s/"$//'
}

# within SECONDS WHY COMMAND...: tries until the command succeeds.
within() {
    within_end=$(($(cut -d. -f1 /proc/uptime) + $1)) within_why=$2
    shift 2
    until "$@"; do
        [ "$(cut -d. -f1 /proc/uptime)" -lt "$within_end" ] || fail "$within_why: $*"
        sleep 0.02
    done
}

# holds WHY COMMAND...: the command succeeds now.
holds() {
    holds_why=$1
    shift
    "$@" || fail "$holds_why: $*"
}

# own_address: gives the network that guests may share (`eth0`) this guest's address; prints the other's.
own_address() {
    [ "$ROLE" = a ] && own_number=1 peer_number=2 || own_number=2 peer_number=1
    ifconfig lo 127.0.0.1 up
    ifconfig eth0 10.9.7.$own_number netmask 255.255.255.0 up
    echo 10.9.7.$peer_number
}

load() { insmod "/lab/modules/$1.ko" $(shift; echo "$@"); }

. /lab/vfio.sh
# finish: ends the script here, well.
finish() {
    set +x
    trap - EXIT
    say done
    exit
}

set -x
. /lab/scenario.sh
finish
