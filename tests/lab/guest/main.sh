# What every scenario's script can use. Sourced with -e: a command that fails ends the guest and the step.
#
# Lines to the lab:   begin STEP | pass STEP | note TEXT | fail STEP: WHY | put KEY VALUE | bridge ACTION | done
# Lines from the lab: put KEY VALUE, as the other guest said it; put bridge done, when the action is taken;
#                     abort, when the other guest has failed
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
    set +e
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

load() { insmod "/lab/modules/$1.ko" $(shift; echo "$@"); }

set -x
. /lab/scenario.sh
set +x
trap - EXIT
say done
