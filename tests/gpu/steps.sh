# Read by the scripts beside it: steps, each a line on standard error and an entry of a log in JSON.
failed=0
steps=()

# Text as it stands within a JSON string.
plain() { printf %s "$1" | tr '\n\t' '  ' | tr -d '\000-\037' | sed 's/[\\"]/\\&/g'; }

say() { # STATE STEP WHAT: pass, fail or waived
    local shown=$1
    [ "$1" = fail ] && shown=FAIL && failed=1
    printf '%-7s%s: %s\n' "$shown" "$2" "$3" >&2
    steps+=("{\"step\":\"$(plain "$2")\",\"state\":\"$1\",\"what\":\"$(plain "$3")\"}")
}

# write_log FILE [NAME JSON_FILE]...: where it ran, what these files hold, and the steps.
write_log() {
    local log=$1
    shift
    {
        printf '{"kernel":"%s","machine":"%s","time":"%s"' "$(uname -r)" "$(uname -m)" "$(date -u +%FT%TZ)"
        while [ $# -gt 0 ]; do
            printf ',"%s":' "$1"
            if [ -s "$2" ]; then tr -d '\n' <"$2"; else printf null; fi
            shift 2
        done
        (IFS=,; printf ',"script":[%s]}\n' "${steps[*]}")
    } >"$log"
    echo "log: $log"
}
