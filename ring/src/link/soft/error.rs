//! What can be wrong with a soft link, in words.

#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing
    )
)]

use rustix::io::Errno;

use super::{
    credentials::Credentials,
    greeting::{Reason, Refusal, VERSION},
    policy::Policy,
};
use crate::link::LinkError;

fn error(name: &'static str, exit: u8, what: String) -> LinkError {
    LinkError {
        name,
        exit,
        what,
        errno: None,
    }
}

fn process(pid: u32) -> String {
    match pid {
        0 => "a process of another pid namespace".to_owned(),
        pid => format!("process {pid}"),
    }
}

pub(super) fn bad_name(name: &str, errno: Errno) -> LinkError {
    LinkError {
        name: "soft-bad-name",
        exit: 2,
        what: format!("'{name}' cannot name a soft link ({errno}): up to 64 printable characters are needed"),
        errno: Some(errno.raw_os_error()),
    }
}

pub(super) fn huge_between_users(name: &str) -> LinkError {
    error(
        "soft-huge-between-users",
        2,
        format!(
            "soft:{name} is open to a group and was asked for huge pages only: between users normal pages are used; \
             leave out one of the two options"
        ),
    )
}

pub(super) fn socket(name: &str, step: &str, errno: Errno) -> LinkError {
    let (class, remedy) = match errno {
        Errno::MFILE | Errno::NFILE => ("link-limits", ": raise the limit on open files with 'ulimit -n'"),
        _ => ("soft-socket", ""),
    };
    LinkError {
        name: class,
        exit: 6,
        what: format!("soft:{name}: {step} failed ({errno}){remedy}"),
        errno: Some(errno.raw_os_error()),
    }
}

pub(super) fn limits(name: &str) -> LinkError {
    error(
        "link-limits",
        6,
        format!(
            "soft:{name}: the peer's {} descriptors do not fit this process's limit on open files: raise it with \
             'ulimit -n'",
            crate::link::ends::DESCRIPTORS
        ),
    )
}

pub(super) fn held_by_stranger(name: &str, holder: Credentials, policy: &Policy) -> LinkError {
    let accepted = match policy.group {
        None => format!("this side accepts user {} only", policy.own.uid),
        Some(group) => format!("this side accepts user {} and group {group}", policy.own.uid),
    };
    error(
        "soft-permission",
        6,
        format!(
            "soft:{name} is held by {} of user {}, group {}, and {accepted}: use another name, or open both sides with \
             a group that both processes are in",
            process(holder.pid),
            holder.uid,
            holder.gid
        ),
    )
}

pub(super) fn version(name: &str, theirs: u32, holder: Credentials) -> LinkError {
    error(
        "soft-version-mismatch",
        7,
        format!(
            "soft:{name}: {} speaks version {theirs} of the greeting, this side version {VERSION}: build both from the \
             same release",
            process(holder.pid)
        ),
    )
}

pub(super) fn refused(name: &str, refusal: &Refusal, holder: Credentials, own: Credentials) -> LinkError {
    let by = process(holder.pid);
    match refusal.reason {
        Reason::Taken => {
            let [a, b] = refusal.holders;
            error(
                "soft-name-taken",
                6,
                format!(
                    "soft:{name} is taken: {} and {} have met there and a link has two ends; use another name or end \
                     one of them",
                    process(a),
                    process(b)
                ),
            )
        }
        Reason::Permission => {
            let needed = match refusal.group {
                None => "it accepts that user only; open it with a group that this process is in".to_owned(),
                Some(group) => format!("it requires that user or group {group}"),
            };
            error(
                "soft-permission",
                6,
                format!(
                    "soft:{name} is held by {by} of user {}, and this process is of user {}, group {}: {needed}",
                    refusal.owner, own.uid, own.gid
                ),
            )
        }
        Reason::Version => version(name, refusal.version, holder),
        Reason::Unfit => error(
            "soft-memory-refused",
            7,
            format!(
                "soft:{name}: {by} cannot use the memory this side has handed over; a window of another user must \
                 stand on normal pages and have 64 bytes to 1 TiB"
            ),
        ),
        Reason::Limits => error(
            "link-limits",
            6,
            format!(
                "soft:{name}: {by} has reached its limit on open files: raise it there with 'ulimit -n' and start both again"
            ),
        ),
    }
}
