//! What a campaign could leave behind on the machine.

use std::{collections::BTreeSet, path::Path};

/// Files and counts that must be the same before and after.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Leftovers {
    files: BTreeSet<String>,
    huge_pages_free: u64,
    descriptors: usize,
}

impl Leftovers {
    /// Lists temporary, run and shared-memory folders, free huge pages and this process's descriptors.
    pub(crate) fn list() -> Self {
        let mut files = BTreeSet::new();
        for folder in ["/tmp", "/run", "/dev/shm", "/var/tmp", "/dev/hugepages"] {
            collect(Path::new(folder), 0, &mut files);
        }
        let mut list = Self {
            files,
            huge_pages_free: ntb_mem::region::huge_pages().1,
            descriptors: 0,
        };
        list.count_descriptors();
        list
    }

    /// Takes this process's descriptors of now for those that were there before.
    pub(crate) fn count_descriptors(&mut self) {
        self.descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    }

    /// What is there now and was not before, in words. Files of other programs are not told apart: only names that
    /// could be of this project count.
    pub(crate) fn new_since(&self, before: &Self) -> Vec<String> {
        let mut found: Vec<String> = self
            .files
            .difference(&before.files)
            .filter(|f| ["ntb", "soft:", "campaign"].iter().any(|n| f.contains(n)))
            .map(|f| format!("left behind: {f}"))
            .collect();
        if self.huge_pages_free < before.huge_pages_free {
            found.push(format!(
                "huge pages free: {} before, {} after",
                before.huge_pages_free, self.huge_pages_free
            ));
        }
        if self.descriptors > before.descriptors {
            found.push(format!(
                "open descriptors: {} before, {} after",
                before.descriptors, self.descriptors
            ));
        }
        found
    }
}

fn collect(folder: &Path, depth: u32, into: &mut BTreeSet<String>) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        into.insert(path.display().to_string());
        if depth < 2 && entry.file_type().is_ok_and(|t| t.is_dir()) {
            collect(&path, depth + 1, into);
        }
    }
}
