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

# The kernel takes the function back, as for an unplugging, an unbinding, or a shutdown: it asks for it, and waits until
# the program lets go. The program lives on.
step wanted-back
if [ "$ROLE" = a ]; then
    serve ntb:$port
    within 30 "ntb-ping serve does not begin" grep -q serving /tmp/served
    echo 1 >/sys/bus/pci/devices/$port/remove
    holds "the kernel has not got the port back" [ ! -e /sys/bus/pci/devices/$port ]
    holds "the program that let go of the port: alive" kill -0 $server
fi
meet taken 90
pass

# There again and bound again, the same program takes it up.
step back
if [ "$ROLE" = a ]; then
    echo 1 >/sys/bus/pci/rescan
    within 60 "the kernel does not find the port" [ -e /sys/bus/pci/devices/$port ]
    vfio_bind
    get measured 120 >/dev/null
    stop_serving
else
    ping_link back ntb:$port --count 100 --warmup 10 --timeout 90s
    put measured yes
fi
pass

# By the button beside the slot. Last: this QEMU does not survive a port in the slot again.
step button
if [ "$ROLE" = a ]; then
    serve ntb:$port
    within 30 "ntb-ping serve does not begin" grep -q serving /tmp/served
    machine a unplug
    within 60 "the kernel does not get the port back" [ ! -e /sys/bus/pci/devices/$port ]
    holds "the program that let go of the port: alive" kill -0 $server
fi
pass
