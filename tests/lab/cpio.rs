//! Archives in the format that the kernel unpacks as its first file system ("newc" cpio).
//!
//! Written here because it is forty lines, and because a tool that packs what is on disk would need root to
//! make device nodes and would carry owners and times of this machine into the guest.

use std::collections::BTreeSet;
use std::path::Path;

use crate::error::{Context as _, LabError};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER: u32 = 0o020_000;

/// An archive being built in memory. Parents come before children, and are added where nobody did: the kernel makes
/// no folder by itself.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    pub(crate) fn folder(&mut self, path: &str) {
        if self.folders.insert(path.to_owned()) {
            self.parents(path);
            self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
        }
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent);
        }
    }

    /// An executable file; a guest has one user, so nothing needs narrower rights.
    pub(crate) fn file(&mut self, path: &str, content: &[u8]) {
        self.parents(path);
        self.entry(path, REGULAR | 0o755, (0, 0), content);
    }

    pub(crate) fn file_from(&mut self, path: &str, source: &Path) -> Result<(), LabError> {
        self.file(path, &std::fs::read(source).context("read", source)?);
        Ok(())
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// A character device node.
    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, CHARACTER | 0o600, (major, minor), &[]);
    }

    /// The finished archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let links = if mode & 0o170_000 == DIRECTORY { 2 } else { 1 };
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        let fields = [
            self.entries,
            mode,
            0,
            0,
            links,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            name_size,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Names and contents end on a multiple of four bytes, counted from the start of the archive.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// Reads back name, mode, device and content, checking the alignment on the way.
    fn parse(bytes: &[u8]) -> Vec<Entry> {
        let mut at = 0;
        let mut entries = Vec::new();
        loop {
            assert_eq!(at % 4, 0);
            assert_eq!(&bytes[at..at + 6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..at + 14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name_at = at + 110;
            let name = String::from_utf8(bytes[name_at..name_at + name_size - 1].to_vec()).unwrap();
            assert_eq!(bytes[name_at + name_size - 1], 0);
            let content_at = (name_at + name_size).next_multiple_of(4);
            if name == "TRAILER!!!" {
                assert_eq!(content_at, bytes.len());
                return entries;
            }
            let content = bytes[content_at..content_at + size].to_vec();
            entries.push((name, mode, (field(9), field(10)), content));
            at = (content_at + size).next_multiple_of(4);
        }
    }

    #[test]
    fn every_entry_reads_back() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.device("dev/console", 5, 1);
        for length in 0..9 {
            archive.file(&"x".repeat(length + 1), &vec![7; length]);
        }
        archive.symlink("sh", "/bin/busybox");
        let entries = parse(&archive.finish());
        assert_eq!(entries.len(), 12);
        assert_eq!(entries[0], ("dev".into(), 0o040_755, (0, 0), vec![]));
        assert_eq!(entries[1], ("dev/console".into(), 0o020_600, (5, 1), vec![]));
        for length in 0..9 {
            assert_eq!(entries[2 + length].0.len(), length + 1);
            assert_eq!(entries[2 + length].3, vec![7; length]);
        }
        assert_eq!(
            entries[11],
            ("sh".into(), 0o120_777, (0, 0), b"/bin/busybox".to_vec())
        );
    }

    #[test]
    fn folders_are_made_once_and_before_what_is_in_them() {
        let mut archive = Archive::default();
        archive.file("usr/lib/one", b"1");
        archive.folder("usr");
        archive.file("usr/lib/two", b"2");
        let names: Vec<String> = parse(&archive.finish())
            .into_iter()
            .map(|entry| entry.0)
            .collect();
        assert_eq!(names, ["usr", "usr/lib", "usr/lib/one", "usr/lib/two"]);
    }
}
