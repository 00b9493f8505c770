# Both guests run this project's programs on the port, through the kernel's VFIO and the guest's IOMMU.

# measure NAME SERVER HOW...: guest SERVER answers, the other measures; HOW of each stands behind the
# port's address.
measure() {
    measure_name=$1 measure_server=$2
    shift 2
    [ "$ROLE" = a ] && measure_how=$1 || measure_how=$2
    if [ "$ROLE" = "$measure_server" ]; then
        # The one that is started second waits for the first to be there.
        [ "$FIRST" = server ] || get measuring >/dev/null
        serve "ntb:$port$measure_how"
        [ "$FIRST" = measuring ] || within 30 "ntb-ping serve does not begin" grep -q serving /tmp/served
        [ "$FIRST" = measuring ] || put serving yes
        get measured 120 >/dev/null
        stop_serving
    else
        [ "$FIRST" = measuring ] || get serving >/dev/null
        [ "$FIRST" = server ] || put measuring yes
        [ "$FIRST" = server ] || sleep 1
        ping_link "$measure_name" "ntb:$port$measure_how" --count 300 --warmup 10 --timeout 60s
        put measured yes
    fi
    meet "$measure_name-over"
}

step bind
vfio_bind
meet bound
pass

step group
FIRST=server
measure group a '' ''
pass

# The one that measures is there first, in the other guest this time.
step other-order
FIRST=measuring
measure other-order b '' ''
pass

step iommufd
FIRST=server
measure iommufd a ,iommufd ,iommufd
measure mixed-interfaces b ,iommufd ''
pass

step stream
if [ "$ROLE" = a ]; then
    serve "ntb:$port" --quiet
    get measured 120 >/dev/null
    stop_serving
else
    ping_link stream "ntb:$port" --oneway --size 1000 --count 300 --warmup 10 --timeout 60s
    put measured yes
fi
no_remote_reads
pass
