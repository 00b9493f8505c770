//! Parsers of values. Each error says what is wrong with the value and what is allowed.

use std::{ops::RangeInclusive, time::Duration};

/// A whole number of a range.
pub fn whole(text: &str, range: &RangeInclusive<u64>, allowed: &str) -> Result<u64, String> {
    let wrong = |what: &str| format!("{what}; allowed: {allowed}");
    if text.is_empty() {
        return Err(wrong("is empty"));
    }
    let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong("is not a whole number"));
    }
    if text.starts_with('-') && digits.bytes().any(|b| b != b'0') {
        return Err(wrong("is negative"));
    }
    match digits.parse::<u64>() {
        Ok(n) if n < *range.start() => Err(wrong("is too small")),
        Ok(n) if n <= *range.end() => Ok(n),
        _ => Err(wrong("is too large")),
    }
}

/// A number of bytes of a range, with KiB, MiB, GiB, TiB or nothing behind it.
pub fn bytes(text: &str, range: &RangeInclusive<u64>, allowed: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 4] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
    ];
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .unwrap_or((text, 1));
    let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    digits
        .then(|| number.parse::<u64>().ok()?.checked_mul(unit))
        .flatten()
        .filter(|bytes| range.contains(bytes))
        .ok_or_else(|| format!("is out of range or no size; allowed: {allowed}"))
}

/// A number of a range, with or without a fraction.
pub fn real(text: &str, range: &RangeInclusive<f64>, allowed: &str) -> Result<f64, String> {
    let wrong = |what: &str| format!("{what}; allowed: {allowed}");
    if text.is_empty() {
        return Err(wrong("is empty"));
    }
    match text.parse::<f64>() {
        Ok(n) if n.is_nan() => Err(wrong("is not a number")),
        Ok(n) if n < 0.0 => Err(wrong("is negative")),
        Ok(n) if n < *range.start() => Err(wrong("is too small")),
        Ok(n) if n > *range.end() => Err(wrong("is too large")),
        Ok(n) => Ok(n),
        Err(_) => Err(wrong("is not a number")),
    }
}

/// A time of a range: a number with `ns`, `us`, `ms`, `s`, `m` or `h` behind it, or of seconds.
pub fn time(text: &str, range: &RangeInclusive<Duration>, allowed: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 6] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3600.0),
    ];
    let wrong = |what: &str| format!("{what}; allowed: {allowed}");
    let (number, scale) = UNITS
        .iter()
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, *scale)))
        .unwrap_or((text, 1.0));
    if text.is_empty() {
        return Err(wrong("is empty"));
    }
    // Letters would let "inf" and "nan" through.
    if !number.bytes().all(|b| b.is_ascii_digit() || b"+-.".contains(&b)) {
        return Err(wrong("is not a time"));
    }
    let Ok(number) = number.parse::<f64>() else {
        return Err(wrong("is not a time"));
    };
    if number < 0.0 {
        return Err(wrong("is negative"));
    }
    match Duration::try_from_secs_f64(number * scale) {
        Ok(t) if t < *range.start() => Err(wrong("is too small")),
        Ok(t) if t <= *range.end() => Ok(t),
        _ => Err(wrong("is too large")),
    }
}

/// One of a few words.
pub fn word<T: Copy>(text: &str, words: &[(&str, T)], allowed: &str) -> Result<T, String> {
    let wrong = |what: &str| format!("{what}; allowed: {allowed}");
    if text.is_empty() {
        return Err(wrong("is empty"));
    }
    words
        .iter()
        .find(|(w, _)| *w == text)
        .map(|(_, value)| *value)
        .ok_or_else(|| wrong("is not known"))
}

/// One processor, or two with a comma between them.
pub fn cpus(text: &str, most: usize, allowed: &str) -> Result<(u32, Option<u32>), String> {
    let top = u64::from(MAX_CPU);
    let mut parts = text.split(',').map(|part| whole(part, &(0..=top), allowed));
    let first = parts
        .next()
        .unwrap_or_else(|| Err(format!("is empty; allowed: {allowed}")))?;
    let second = parts.next().transpose()?;
    if parts.next().is_some() || (second.is_some() && most < 2) {
        return Err(format!("names too many processors; allowed: {allowed}"));
    }
    Ok((first as u32, second.map(|n| n as u32)))
}

/// Largest processor number that the kernel's interface for pinning takes here.
pub const MAX_CPU: u32 = 1023;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_numbers() {
        let parse = |t: &str| whole(t, &(1..=100), "1 to 100");
        assert_eq!(parse("1"), Ok(1));
        assert_eq!(parse("+100"), Ok(100));
        for (text, what) in [
            ("", "is empty"),
            ("0", "is too small"),
            ("-0", "is too small"),
            ("-5", "is negative"),
            ("101", "is too large"),
            ("99999999999999999999999999", "is too large"),
            ("-", "is not a whole number"),
            ("x", "is not a whole number"),
            ("1.5", "is not a whole number"),
            ("0x10", "is not a whole number"),
            (" 1", "is not a whole number"),
        ] {
            assert_eq!(parse(text), Err(format!("{what}; allowed: 1 to 100")), "{text:?}");
        }
    }

    #[test]
    fn real_numbers() {
        let parse = |t: &str| real(t, &(0.5..=1e6), "0.5 to 1000000");
        assert_eq!(parse("0.5"), Ok(0.5));
        assert_eq!(parse("1e6"), Ok(1e6));
        for (text, what) in [
            ("", "empty"),
            ("0", "small"),
            ("-1", "negative"),
            ("nan", "not a number"),
            ("inf", "too large"),
            ("-inf", "negative"),
            ("1e300", "too large"),
            ("ten", "not a number"),
        ] {
            assert!(parse(text).unwrap_err().contains(what), "{text:?}");
        }
    }

    #[test]
    fn times() {
        let parse = |t: &str| {
            time(
                t,
                &(Duration::from_millis(1)..=Duration::from_secs(3600)),
                "1ms to 1h",
            )
        };
        for (text, ms) in [
            ("2", 2000),
            ("500ms", 500),
            ("2s", 2000),
            ("1m", 60_000),
            ("0.25", 250),
            ("1h", 3_600_000),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text:?}");
        }
        for (text, what) in [
            ("", "empty"),
            ("0", "small"),
            ("10us", "small"),
            ("-1s", "negative"),
            ("s", "not a time"),
            ("inf", "not a time"),
            ("1e3", "not a time"),
            ("2h", "large"),
            ("99999999999999999999999", "large"),
            ("1d", "not a time"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(e.contains(what) && e.contains("1ms to 1h"), "{text:?}: {e}");
        }
    }

    #[test]
    fn processors() {
        assert_eq!(cpus("3", 2, "r"), Ok((3, None)));
        assert_eq!(cpus("0,1", 2, "r"), Ok((0, Some(1))));
        for text in ["", ",", "1,", ",1", "-1", "a", "1,2,3", "1024", "1;2"] {
            assert!(
                cpus(text, 2, "r").unwrap_err().ends_with("allowed: r"),
                "{text:?}"
            );
        }
        assert!(cpus("0,1", 1, "r").is_err());
    }

    #[test]
    fn words() {
        let list = [("spin", 1), ("yield", 2)];
        assert_eq!(word("yield", &list, "spin or yield"), Ok(2));
        assert!(word("", &list, "spin or yield").unwrap_err().contains("empty"));
        assert!(
            word("Spin", &list, "spin or yield")
                .unwrap_err()
                .contains("spin or yield")
        );
    }
}
