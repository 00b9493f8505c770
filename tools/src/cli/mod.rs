//! Options whose errors are one line that names the allowed range.
//!
//! The parser is clap's; what differs is that values are parsed here, by functions that know their range, and that a
//! usage error is cut to one line.

pub mod linux;
pub mod ping;
pub mod values;

use clap::{
    Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use crate::exit::{Exit, Failure};

/// What the command line leads to when it is not a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Help or version: text for standard output.
    Text(String),
    /// A usage error: one line for standard error.
    Wrong(Failure),
}

/// Allowed range of an option, for messages about values that are missing altogether.
pub type Ranges = &'static [(&'static str, &'static str)];

/// Parses a command line, program name first.
pub fn parse<T: Parser>(
    args: impl IntoIterator<Item = std::ffi::OsString>,
    ranges: Ranges,
) -> Result<T, Answer> {
    T::try_parse_from(args).map_err(|e| match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Answer::Text(e.to_string()),
        _ => Answer::Wrong(Failure::new(Exit::Usage, "usage", one_line(&e, ranges))),
    })
}

fn one_line(error: &clap::Error, ranges: Ranges) -> String {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(s)) => Some(s.as_str()),
        _ => None,
    };
    let option = text(ContextKind::InvalidArg).unwrap_or_default();
    if let (ErrorKind::ValueValidation, Some(cause)) = (error.kind(), std::error::Error::source(error)) {
        let value = text(ContextKind::InvalidValue).unwrap_or_default();
        return format!("{option}: '{}' {cause}", printable(value));
    }
    if let (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(missing))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    {
        return format!("{} is missing (see --help)", missing.join(", "));
    }
    let all = error.to_string();
    let first = all.lines().next().unwrap_or_default();
    let first = printable(first.trim_start_matches("error:").trim());
    let range = ranges
        .iter()
        .find(|(name, _)| option.split_whitespace().any(|word| word == *name));
    match range {
        Some((_, range)) if error.kind() == ErrorKind::InvalidValue => format!("{first}; allowed: {range}"),
        _ => format!("{first} (see --help)"),
    }
}

/// A user's text as one printable line of bearable length.
fn printable(text: &str) -> String {
    const LONGEST: usize = 120;
    let mut out: String = text
        .chars()
        .take(LONGEST)
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        out.push_str("...");
    }
    out
}
