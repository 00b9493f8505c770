# What stands in the way of opening a port, each seen for real: the driver refuses with its name and remedy, and ntb-check
# names the same. Guest a has an IOMMU and a second function on the port's card; guest b has no IOMMU.

ping_says() {
    exits "$1" ntb-ping ntb:$port --timeout 300ms --count 1
    says "$2"
}
check_says() {
    check_status=0
    ntb-check $port >/tmp/said 2>&1 || check_status=$?
    [ "$check_status" = "$1" ] || fail "ntb-check ended with $check_status, not $1: $(tr '\n' ' ' </tmp/said)"
    says "$2"
}

step no-driver
ping_says 6 wrong-driver
check_says 6 wrong-driver
pass

step kernel-driver
load ntb_hw_intel
ping_says 6 wrong-driver
says ntb_hw_intel
check_says 6 wrong-driver
says ntb_hw_intel
pass

if [ "$ROLE" = b ]; then
    step no-iommu
    check_says 6 no-iommu
    # vfio-pci takes nothing that no IOMMU guards, unless it is told to.
    echo Y >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode
    vfio_bind
    ping_says 6 no-iommu
    check_says 6 no-iommu
    # Told to, it needs memory in one piece: a huge page.
    exits 2 ntb-ping ntb:$port,no-iommu --timeout 300ms
    says "use one huge page"
    echo 4 >/proc/sys/vm/nr_hugepages
    exits 4 ntb-ping ntb:$port,no-iommu --timeout 300ms
    pass
fi

if [ "$ROLE" = a ]; then
    step group
    vfio_bind
    other=0000:01:00.1
    holds "the card's other function has no driver" [ -e /sys/bus/pci/devices/$other/driver ]
    ping_says 6 group-not-viable
    says $other
    check_says 6 group-not-viable
    says $other
    echo $other >/sys/bus/pci/devices/$other/driver/unbind
    exits 4 ntb-ping ntb:$port --timeout 300ms
    pass

    # A user without rights: the node first, then locked memory.
    step permission
    node=/dev/vfio/$(basename "$(readlink /sys/bus/pci/devices/$port/iommu_group)")
    exits 6 lab-inside as-user 1000 ntb-ping ntb:$port --timeout 300ms
    says no-permission
    says "$node"
    pass

    step memlock
    chmod 666 "$node" /dev/vfio/vfio
    (
        ulimit -l 64
        exits 6 lab-inside as-user 1000 ntb-ping serve ntb:$port
        says memlock-too-small
        says "'ulimit -l'"
    )
    pass

    step huge-pages
    check_says 0 no-huge-pages
    pass

    # As Secure Boot would have switched on at boot.
    step lockdown
    mount -t securityfs securityfs /sys/kernel/security
    echo integrity >/sys/kernel/security/lockdown
    check_says 0 lockdown
    exits 3 ntb-ping ntb:$port --engine wc --timeout 300ms
    says lockdown
    # Without write-combining it works.
    exits 4 ntb-ping ntb:$port --timeout 300ms
    pass
fi
