//! Programs that guests run besides busybox: this workspace's own, built here when they are not fresh, and Debian's from
//! the prepared root; with the libraries that each of them loads.
//!
//! They are linked dynamically and brought with the root's C library: what loads libraries at run time (RDMA, CUDA)
//! cannot do so from a static program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Context as _, LabError};
use crate::report::say;
use crate::setup::Prepared;

/// Where the guests' loader looks without being told.
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LOADER: &str = "lib64/ld-linux-x86-64.so.2";

/// Files of a guest: where they lie there, and here.
pub(crate) type Files = BTreeMap<String, PathBuf>;

/// Builds this workspace's programs, in the profile that the lab itself was built in, and returns their folder.
pub(crate) fn build() -> Result<PathBuf, LabError> {
    let own = std::env::current_exe().context("find", Path::new("the lab's own program"))?;
    let folder = own.parent().unwrap_or(Path::new("/")).to_owned();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["build", "--quiet", "--locked", "--bins", "--profile", profile])
        .args(["-p", "ntb-tools", "-p", "ntb-tests", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .arg("--target-dir")
        .arg(folder.parent().unwrap_or(&folder));
    say("building the programs that guests run");
    let output = command
        .stdin(Stdio::null())
        .output()
        .context("run", Path::new(command.get_program()))?;
    if output.status.success() {
        return Ok(folder);
    }
    let log = std::env::temp_dir().join("ntb-lab-programs.log");
    fs::write(&log, &output.stderr).context("write", &log)?;
    Err(LabError::Command {
        what: format!("{command:?}"),
        status: output.status.to_string(),
        tail: crate::report::tail(&log, 25),
        log,
    })
}

/// Adds programs of this workspace, by name, to `/bin`.
pub(crate) fn add_own(
    prepared: &Prepared,
    built: &Path,
    names: &[&str],
    files: &mut Files,
) -> Result<(), LabError> {
    for name in names {
        let path = stripped(&built.join(name))?;
        add_libraries(prepared, &path, files)?;
        files.insert(format!("bin/{name}"), path);
    }
    Ok(())
}

/// Adds files of the Debian root, by path in it; of folders, what is in them.
pub(crate) fn add_debian(prepared: &Prepared, paths: &[&str], files: &mut Files) -> Result<(), LabError> {
    let mut left: Vec<String> = paths.iter().map(|path| (*path).to_owned()).collect();
    while let Some(path) = left.pop() {
        let here = prepared.root.join(&path);
        if here.is_dir() {
            for entry in fs::read_dir(&here).context("list", &here)? {
                let name = entry.context("list", &here)?.file_name();
                left.push(format!("{path}/{}", name.to_string_lossy()));
            }
            continue;
        }
        let begins = fs::read(&here).context("read", &here)?;
        if begins.starts_with(b"\x7fELF") {
            add_libraries(prepared, &here, files)?;
        }
        files.insert(path, here);
    }
    Ok(())
}

/// What the root's loader would load for a program or library.
fn add_libraries(prepared: &Prepared, program: &Path, files: &mut Files) -> Result<(), LabError> {
    let loader = prepared.root.join(LOADER);
    let output = Command::new(&loader)
        .arg("--library-path")
        .arg(prepared.root.join(LIBRARIES))
        .arg("--list")
        .arg(program)
        .output()
        .context("run", &loader)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let missing: BTreeSet<&str> = text.lines().filter(|line| line.contains("not found")).collect();
    if !output.status.success() || !missing.is_empty() {
        return Err(LabError::Libraries {
            program: program.to_owned(),
            why: format!("{text}{}", String::from_utf8_lossy(&output.stderr)),
        });
    }
    files.insert(LOADER.to_owned(), loader);
    for line in text.lines() {
        // name => path (address)
        let Some((name, rest)) = line.trim().split_once(" => ") else {
            continue;
        };
        let path = rest.rsplit_once(" (").map_or(rest, |(path, _)| path);
        let name = name.rsplit('/').next().unwrap_or(name);
        if !name.starts_with("ld-linux") {
            files.insert(format!("{LIBRARIES}/{name}"), PathBuf::from(path));
        }
    }
    Ok(())
}

/// The program without what only a debugger reads: a guest keeps its files in memory. Where there is no `strip`, the
/// program as it is.
fn stripped(program: &Path) -> Result<PathBuf, LabError> {
    let out = program.with_extension("stripped");
    let time = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let built = fs::metadata(program)
        .and_then(|data| data.modified())
        .context("find", program)?;
    if time(&out).is_some_and(|stripped| stripped > built) {
        return Ok(out);
    }
    let run = Command::new("strip").arg("-o").arg(&out).arg(program).status();
    Ok(match run {
        Ok(status) if status.success() => out,
        _ => program.to_owned(),
    })
}
