//! What guests are made of, prepared without being asked: QEMU and busybox from Debian packages, the kernel
//! and its modules from Debian's kernel source.

mod cache;
mod debian;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Context as _, LabError};
use crate::report::say;
pub(crate) use cache::Cache;
use debian::Bootstrap;

/// Kernel options over `tinyconfig`, with the reason for each group.
const KERNEL_CONFIG: &str = include_str!("kernel.config");
const KERNEL_SCRIPT: &str = include_str!("setup/kernel.sh");

const QEMU_PACKAGES: &[&str] = &[
    "qemu-system-x86",
    "seabios",
    "busybox-static",
    "iproute2",          // `rdma link add`
    "ibverbs-providers", // of soft-RoCE and siw
    "perftest",          // `ib_write_lat`, to compare with
];
const KERNEL_PACKAGES: &[&str] = &[
    "linux-source-6.12",
    "gcc",
    "libc6-dev",
    "make",
    "flex",
    "bison",
    "bc",
    "libelf-dev",
    "libssl-dev", // lockdown selects module signatures: headers for the signer ...
    "openssl",    // ... and the program that makes the key
    "xz-utils",
];

/// Everything a guest is started from.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// A Debian root; QEMU is started from it with its own loader and libraries, so no chroot is needed.
    pub root: PathBuf,
    pub kernel: Kernel,
}

/// A guest kernel and its modules.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    pub image: PathBuf,
    /// Folder with `*.ko`.
    pub modules: PathBuf,
}

impl Prepared {
    /// Makes what the cache lacks and says what it does and how long it takes.
    pub(crate) fn ensure(cache: &Cache) -> Result<Self, LabError> {
        let kernel = match std::env::var_os("NTB_LAB_KERNEL").filter(|value| !value.is_empty()) {
            Some(folder) => Kernel::in_folder(Path::new(&folder), |missing| LabError::KernelFolder {
                folder: PathBuf::from(&folder),
                missing,
            })?,
            None => kernel(cache)?,
        };
        Ok(Self {
            root: root(cache)?,
            kernel,
        })
    }

    pub(crate) fn busybox(&self) -> PathBuf {
        self.root.join("usr/bin/busybox")
    }

    pub(crate) fn describe(&self) {
        say(&format!("QEMU and busybox: {}", self.root.display()));
        say(&format!("kernel: {}", self.kernel.image.display()));
        say(&format!("modules: {}", self.kernel.modules.display()));
    }
}

impl Kernel {
    fn in_folder(folder: &Path, missing: impl Fn(&'static str) -> LabError) -> Result<Self, LabError> {
        let names = |folder: &Path| -> Vec<PathBuf> {
            let mut found: Vec<_> = fs::read_dir(folder)
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path())
                .collect();
            found.sort();
            found
        };
        let is_image = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("bzImage"))
        };
        let image = names(folder)
            .into_iter()
            .rfind(is_image)
            .ok_or_else(|| missing("bzImage*"))?;
        let modules = folder.join("modules");
        if !names(&modules)
            .iter()
            .any(|path| path.extension().is_some_and(|end| end == "ko"))
        {
            return Err(missing("modules/*.ko"));
        }
        Ok(Self { image, modules })
    }
}

fn root(cache: &Cache) -> Result<PathBuf, LabError> {
    let inputs = [debian::SUITE, debian::PINS, &QEMU_PACKAGES.join(",")];
    let folder = cache.entry("qemu", &inputs, |folder| {
        timed(
            "QEMU and busybox from Debian packages",
            "about half a minute",
            || {
                let root = folder.join("root");
                Bootstrap {
                    root: Some(&root),
                    packages: QEMU_PACKAGES,
                    hooks: &[],
                    work: folder,
                }
                .run()
            },
        )
    })?;
    let root = folder.join("root");
    for needed in ["usr/bin/qemu-system-x86_64", "usr/bin/busybox"] {
        if !root.join(needed).exists() {
            return Err(LabError::Incomplete {
                what: needed,
                place: folder,
            });
        }
    }
    Ok(root)
}

fn kernel(cache: &Cache) -> Result<Kernel, LabError> {
    let inputs = [
        debian::SUITE,
        KERNEL_CONFIG,
        KERNEL_SCRIPT,
        &KERNEL_PACKAGES.join(","),
    ];
    let folder = cache.entry("kernel", &inputs, |folder| {
        let expectation = "about 12 minutes on two idle cores; NTB_LAB_KERNEL takes a ready one";
        timed("guest kernel from Debian's source", expectation, || {
            for (name, content) in [("kernel.config", KERNEL_CONFIG), ("kernel.sh", KERNEL_SCRIPT)] {
                let path = folder.join(name);
                fs::write(&path, content).context("write", &path)?;
            }
            let place = folder.display();
            let hooks = [
                "mkdir -p \"$1\"/lab".to_owned(),
                format!("copy-in '{place}/kernel.config' '{place}/kernel.sh' /lab"),
                "chroot \"$1\" sh /lab/kernel.sh".to_owned(),
                format!("copy-out /lab/out '{place}'"),
            ];
            Bootstrap {
                root: None,
                packages: KERNEL_PACKAGES,
                hooks: &hooks,
                work: folder,
            }
            .run()
        })
    })?;
    Kernel::in_folder(&folder.join("out"), |what| LabError::Incomplete {
        what,
        place: folder.clone(),
    })
}

/// Runs a step, saying before what it is and after how long it took.
fn timed<T>(
    what: &str,
    expectation: &str,
    step: impl FnOnce() -> Result<T, LabError>,
) -> Result<T, LabError> {
    say(&format!("preparing {what} ({expectation})"));
    let start = Instant::now();
    let result = step()?;
    let elapsed = Duration::from_secs(start.elapsed().as_secs());
    say(&format!("prepared {what} in {elapsed:?}"));
    Ok(result)
}
