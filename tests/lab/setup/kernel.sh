#!/bin/sh
# Compiles the guest kernel inside a Debian root that has linux-source and a compiler.
# In:  /lab/kernel.config      Out: /lab/out/bzImage-VERSION, /lab/out/modules/*.ko
set -eu
cd /lab
tar -xf /usr/src/linux-source-*.tar.xz --one-top-level=source --strip-components=1
cd source
make -s ARCH=x86_64 tinyconfig
scripts/kconfig/merge_config.sh -m .config ../kernel.config >/dev/null
make -s ARCH=x86_64 olddefconfig

# An option whose dependency is missing vanishes silently: say which, rather than fail in a guest.
lost=$(grep '^CONFIG' ../kernel.config | grep -vxFf .config || true)
if [ -n "$lost" ]; then
    echo "options that this kernel does not take: $lost" >&2
    exit 1
fi

make -s ARCH=x86_64 -j"$(nproc)" bzImage modules
mkdir -p ../out/modules
cp arch/x86/boot/bzImage "../out/bzImage-$(make -s kernelversion)"
find . -name '*.ko' -exec cp {} ../out/modules/ \;
