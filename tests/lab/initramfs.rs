//! The first and only file system of a guest: busybox, kernel modules, programs and the scenario's script.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cpio::Archive;
use crate::error::{Context as _, LabError};
use crate::programs::Files;
use crate::setup::Prepared;

const INIT: &str = include_str!("guest/init.sh");
const MAIN: &str = include_str!("guest/main.sh");
const VFIO: &str = include_str!("guest/vfio.sh");

/// Packs a guest's file system. Both guests of a scenario share it; what differs is on the kernel command line.
pub(crate) fn pack(prepared: &Prepared, script: &str, files: &Files) -> Result<Vec<u8>, LabError> {
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "lab", "lab/modules"] {
        archive.folder(folder);
    }
    archive.device("dev/console", 5, 1);
    archive.file_from("bin/busybox", &prepared.busybox())?;
    archive.symlink("bin/sh", "busybox");
    archive.file("init", INIT.as_bytes());
    archive.file("lab/main.sh", MAIN.as_bytes());
    archive.file("lab/vfio.sh", VFIO.as_bytes());
    archive.file("lab/scenario.sh", script.as_bytes());
    for module in sorted(&prepared.kernel.modules)? {
        archive.file_from(&format!("lab/modules/{}", file_name(&module)), &module)?;
    }
    for (path, source) in files {
        archive.file_from(path, source)?;
    }
    Ok(archive.finish())
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>, LabError> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).context("list", folder)? {
        paths.push(entry.context("list", folder)?.path());
    }
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}
