# The port vanishes under the running program, without a word and by its slot's button; the program of the other guest
# lives through it.

step bind
vfio_bind
meet bound
pass

step traffic
start_half --seed 1
half_says traffic 90
meet traffic
pass

# Out of the slot and back, faster than anybody is told: the driver notices by itself and takes the port up again.
step surprise
if [ "$ROLE" = b ]; then
    bridge remove a
    sleep 1
    bridge return a
fi
end_half surprise
holds "the port's loss ended no life" [ "$(field lives /tmp/half.json)" -gt 1 ]
pass

# By the button beside the slot: the kernel asks the program to let go of the device, and takes it away.
step unplug
if [ "$ROLE" = a ]; then
    serve ntb:$port
    within 30 "ntb-ping serve does not begin" grep -q serving /tmp/served
    machine a unplug
    within 60 "the kernel does not get the port back" [ ! -e /sys/bus/pci/devices/$port ]
    note "served: $(tail -n 3 /tmp/served | tr '\n' ' ')"
    kill -INT $server
    wait $server || true
fi
meet unplugged 90
pass

step plug
if [ "$ROLE" = a ]; then
    machine a plug
    within 60 "the kernel does not find the port" [ -e /sys/bus/pci/devices/$port ]
    vfio_bind
    serve ntb:$port
    get measured 120 >/dev/null
    stop_serving
else
    ping_link back ntb:$port --count 100 --warmup 10 --timeout 90s
    put measured yes
fi
pass
