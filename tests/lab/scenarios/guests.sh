# Guests without a bridge: what every other scenario takes for granted.

step modules
for module in ntb_hw_intel ntb_hw_amd ntb_hw_epf ntb_pingpong ntb_tool ntb_perf ntb_transport; do
    load $module
done
pass

groups=$(ls /sys/kernel/iommu_groups | wc -l)
if [ "$ROLE" = a ]; then
    step no-iommu
    holds "IOMMU groups without an IOMMU" [ "$groups" = 0 ]
else
    step iommu
    holds "no IOMMU groups" [ "$groups" -gt 0 ]
fi
pass

step words
put greeting "from $ROLE to $PEER"
holds "the other guest's words" [ "$(get greeting)" = "from $PEER to $ROLE" ]
meet end
pass
