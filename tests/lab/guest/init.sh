#!/bin/busybox sh
# First and only program of a guest: mounts what a program expects, opens the channel to the lab, runs the
# scenario's script and powers off. The kernel passes the scenario's settings (ROLE, PEER, ...) as environment.
/bin/busybox mkdir -p /proc /sys /tmp /run/mail
/bin/busybox --install -s /bin
export PATH=/bin:/usr/bin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t debugfs debugfs /sys/kernel/debug
mount -t tmpfs tmpfs /tmp
mount -t devtmpfs devtmpfs /dev

for port in /sys/class/virtio-ports/*; do
    [ "$(cat "$port/name")" = lab ] && exec 3<>"/dev/${port##*/}"
done

# The shell's own trace is the evidence when a command fails.
sh /lab/main.sh 2>/tmp/trace
sync
poweroff -f
