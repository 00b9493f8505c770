//! Descriptions of machines: what the kernel's files say, as far as the check reads them, in one JSON file.
//!
//! A description is unpacked to a directory that stands for the machine's root, so that the same code reads both.

use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, PermissionsExt, symlink},
    path::{Component, Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use ntb::pci::machine::Machine;
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Failure};

/// Version of the file.
pub const SCHEMA: u32 = 1;
/// Largest file that is read.
const LARGEST: u64 = 64 << 20;
/// Largest offset of bytes within a file.
const LARGEST_OFFSET: u64 = 1 << 20;

/// A machine in one file. Paths are absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Version of the file.
    pub ntb_machine: u32,
    /// Text files.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// Symbolic links, with what they point to.
    #[serde(default)]
    pub links: BTreeMap<String, String>,
    /// Directories of which only the name counts.
    #[serde(default)]
    pub directories: Vec<String>,
    /// Binary files of which parts are known: offset, and bytes in hexadecimal.
    #[serde(default)]
    pub bytes: BTreeMap<String, Vec<(u64, String)>>,
    /// Nodes, and whether the user may read and write them.
    #[serde(default)]
    pub nodes: BTreeMap<String, bool>,
}

/// A machine to look at, which lasts as long as this.
#[derive(Debug)]
pub struct Described {
    machine: Machine,
    /// Removed at the end.
    unpacked: Option<PathBuf>,
}

impl Described {
    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// A machine from a description, or from a directory that holds such a tree of files already.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let wrong = |why: String| {
            Failure::new(
                Exit::Usage,
                "bad-description",
                format!("{}: {why}", path.display()),
            )
        };
        let about = fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
        if about.is_dir() {
            return Ok(Self {
                machine: Machine::at(path),
                unpacked: None,
            });
        }
        if !about.is_file() || about.len() > LARGEST {
            return Err(wrong(format!("is no file of at most {LARGEST} bytes")));
        }
        let text = fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
        let description: Description = serde_json::from_str(&text)
            .map_err(|e| wrong(format!("is no description that 'ntb-check record' writes: {e}")))?;
        if description.ntb_machine != SCHEMA {
            return Err(Failure::new(
                Exit::Mismatch,
                "description-version",
                format!(
                    "{}: is of version {}, and this program knows version {SCHEMA}: record it anew",
                    path.display(),
                    description.ntb_machine
                ),
            ));
        }
        Self::unpack(&description).map_err(|e| wrong(format!("cannot be unpacked: {e}")))
    }

    /// Unpacks a description.
    pub fn unpack(description: &Description) -> io::Result<Self> {
        let root = own_directory()?;
        let this = Self {
            machine: Machine::at(&root),
            unpacked: Some(root.clone()),
        };
        // Links come last: nothing is written through them.
        for path in &description.directories {
            fs::create_dir_all(place(&root, path)?)?;
        }
        for (path, text) in &description.files {
            fs::write(parented(&root, path)?, text)?;
        }
        for (path, parts) in &description.bytes {
            let file = File::create(parented(&root, path)?)?;
            for (offset, hex) in parts {
                if *offset > LARGEST_OFFSET {
                    return Err(io::Error::other(format!("{path}: offset {offset} is too large")));
                }
                let bytes =
                    from_hex(hex).ok_or_else(|| io::Error::other(format!("{path}: bad bytes '{hex}'")))?;
                file.write_all_at(&bytes, *offset)?;
            }
        }
        for (path, usable) in &description.nodes {
            let at = parented(&root, path)?;
            fs::write(&at, "")?;
            fs::set_permissions(&at, fs::Permissions::from_mode(if *usable { 0o600 } else { 0 }))?;
        }
        for (path, to) in &description.links {
            symlink(to, parented(&root, path)?)?;
        }
        Ok(this)
    }
}

impl Drop for Described {
    fn drop(&mut self) {
        if let Some(root) = &self.unpacked {
            let _ = fs::remove_dir_all(root);
        }
    }
}

/// A new directory that only this user reaches.
fn own_directory() -> io::Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ntb-check-{}-{n}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && n < 1000 => {}
            Err(e) => return Err(e),
        }
    }
}

/// Where a path of the machine lies below the root; never anywhere else.
fn place(root: &Path, path: &str) -> io::Result<PathBuf> {
    let inner = Path::new(path).strip_prefix("/").ok().filter(|inner| {
        let plain = |c: Component<'_>| matches!(c, Component::Normal(_));
        inner.components().all(plain) && inner.components().next().is_some()
    });
    inner
        .map(|inner| root.join(inner))
        .ok_or_else(|| io::Error::other(format!("'{path}' is no plain absolute path")))
}

fn parented(root: &Path, path: &str) -> io::Result<PathBuf> {
    let at = place(root, path)?;
    if let Some(parent) = at.parent() {
        fs::create_dir_all(parent)?;
    }
    Ok(at)
}

fn from_hex(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.bytes().all(|b| b.is_ascii_hexdigit()) && hex.len().is_multiple_of(2);
    let pair = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    digits.then(|| (0..hex.len()).step_by(2).map(pair).collect())?
}

/// Bytes in hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(edit: impl FnOnce(&mut Description)) -> io::Result<Described> {
        let mut description = Description {
            ntb_machine: SCHEMA,
            ..Description::default()
        };
        edit(&mut description);
        Described::unpack(&description)
    }

    #[test]
    fn what_is_unpacked_is_read_and_goes_away() {
        let d = described(|d| {
            d.files.insert("/sys/a".into(), "text\n".into());
            d.links.insert("/sys/b".into(), "../x/name".into());
            d.bytes.insert("/sys/c".into(), vec![(0x20, "ff00".into())]);
            d.nodes.insert("/dev/n".into(), true);
            d.nodes.insert("/dev/m".into(), false);
        })
        .unwrap();
        let machine = d.machine();
        assert_eq!(machine.text("/sys/a").as_deref(), Some("text"));
        assert_eq!(machine.link_name("/sys/b").as_deref(), Some("name"));
        assert_eq!(fs::read(machine.path("/sys/c")).unwrap()[0x20..], [0xFF, 0]);
        assert!(machine.may_use("/dev/n") && !machine.may_use("/dev/m") && !machine.may_use("/dev/o"));
        let root = machine.path("/");
        drop(d);
        assert!(!root.exists());
    }

    #[test]
    fn nothing_is_written_outside() {
        for bad in ["a", "/../a", "/sys/../../a", "/", "", "/sys/./../a"] {
            assert!(
                described(|d| drop(d.files.insert(bad.into(), String::new()))).is_err(),
                "{bad}"
            );
        }
        // A link cannot be made a directory of another file.
        let through = described(|d| {
            d.links.insert("/sys".into(), "/tmp".into());
            d.files.insert("/sys/a".into(), String::new());
        });
        assert!(through.is_err());
        assert!(described(|d| drop(d.bytes.insert("/c".into(), vec![(0, "abc".into())]))).is_err());
        assert!(described(|d| drop(d.bytes.insert("/c".into(), vec![(u64::MAX, "ab".into())]))).is_err());
    }
}
