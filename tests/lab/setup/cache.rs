//! Where prepared things are kept: one folder outside the source tree, entries named by what went into them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::error::{Context as _, LabError};
use crate::report::say;

/// The lab's cache folder, locked for as long as this value lives: two labs at once on one machine would
/// starve each other's guests into time-outs, and would prepare the same entry twice.
#[derive(Debug)]
pub(crate) struct Cache {
    root: PathBuf,
    _lock: File,
}

impl Cache {
    /// `NTB_LAB_CACHE`, else `$XDG_CACHE_HOME/ntb-lab`, else `~/.cache/ntb-lab`.
    pub(crate) fn open() -> Result<Self, LabError> {
        let root = if let Some(folder) = variable("NTB_LAB_CACHE") {
            folder
        } else if let Some(folder) = variable("XDG_CACHE_HOME") {
            folder.join("ntb-lab")
        } else if let Some(home) = variable("HOME") {
            home.join(".cache/ntb-lab")
        } else {
            return Err(LabError::NoCacheFolder {
                what: "guest kernel and QEMU",
            });
        };
        fs::create_dir_all(&root).context("create", &root)?;
        let root = root.canonicalize().context("resolve", &root)?;
        let lock_path = root.join("lock");
        let lock = File::create(&lock_path).context("create", &lock_path)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            say(&format!("waiting for another lab, which uses {}", root.display()));
            rustix::fs::flock(&lock, FlockOperation::LockExclusive)
                .map_err(Into::into)
                .context("lock", &lock_path)?;
        }
        Ok(Self { root, _lock: lock })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The entry `kind` made from `inputs`: its folder when `make` has completed before, else after `make`
    /// has filled it. A half-made entry of an interrupted run is thrown away.
    pub(crate) fn entry(
        &self,
        kind: &str,
        inputs: &[&str],
        make: impl FnOnce(&Path) -> Result<(), LabError>,
    ) -> Result<PathBuf, LabError> {
        let folder = self.root.join(format!("{kind}-{:016x}", fingerprint(inputs)));
        if folder.exists() {
            return Ok(folder);
        }
        let unfinished = self.root.join(format!("{kind}.unfinished"));
        if unfinished.exists() {
            // Whatever is mounted there is not the lab's to delete.
            if let Some(mount) = mounted_below(&unfinished) {
                return Err(LabError::Mounted {
                    folder: unfinished,
                    mount,
                });
            }
            fs::remove_dir_all(&unfinished).context("remove", &unfinished)?;
        }
        fs::create_dir_all(&unfinished).context("create", &unfinished)?;
        make(&unfinished)?;
        fs::rename(&unfinished, &folder).context("rename to its final name", &folder)?;
        Ok(folder)
    }
}

/// The first mount below a folder, if there is one.
fn mounted_below(folder: &Path) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    points
        .map(|point| PathBuf::from(point.replace("\\040", " ")))
        .find(|point| point.starts_with(folder))
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}

/// FNV-1a over the inputs with their lengths. Names a cache entry; guards against nothing but staleness.
fn fingerprint(inputs: &[&str]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for input in inputs {
        add(&input.len().to_le_bytes());
        add(input.as_bytes());
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::{fingerprint, mounted_below};

    #[test]
    fn what_is_mounted_below_a_folder_is_found() {
        assert_eq!(
            mounted_below("/proc".as_ref()).unwrap(),
            std::path::Path::new("/proc")
        );
        assert_eq!(mounted_below("/pro".as_ref()), None);
    }

    #[test]
    fn fingerprint_tells_inputs_apart() {
        assert_ne!(fingerprint(&["ab", "c"]), fingerprint(&["a", "bc"]));
        assert_ne!(fingerprint(&[]), fingerprint(&[""]));
        // Published FNV-1a value of eight zero bytes (the length of the empty input).
        assert_eq!(fingerprint(&[""]), {
            let mut hash = 0xcbf2_9ce4_8422_2325_u64;
            for _ in 0..8 {
                hash = hash.wrapping_mul(0x0100_0000_01b3);
            }
            hash
        });
    }
}
