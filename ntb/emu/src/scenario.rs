//! Scenarios as text: one step a line, `WHEN ACTION`; `#` starts a comment. `docs/emulator.md` has the grammar.

use std::{str::FromStr, time::Duration};

use rustix::io::Errno;

use crate::model::{
    Action, SideId,
    disturb::{Counted, Range, Severity, Step, When},
};

/// Why a line is not a step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem} in '{text}'")]
pub struct ScenarioError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong.
    pub problem: String,
    /// The line.
    pub text: String,
}

impl ScenarioError {
    /// A stable name.
    pub fn name(&self) -> &'static str {
        "bad-scenario"
    }
}

/// Parses a whole file.
///
/// # Errors
/// The first line that is not a step.
pub fn parse(text: &str) -> Result<Vec<Step>, ScenarioError> {
    let mut steps = Vec::new();
    for (i, full) in text.lines().enumerate() {
        let line = full.split('#').next().unwrap_or_default().trim();
        if !line.is_empty() {
            steps.push(step(line).map_err(|problem| ScenarioError {
                line: i + 1,
                problem,
                text: line.to_owned(),
            })?);
        }
    }
    Ok(steps)
}

/// Parses an action alone, as the control socket takes it.
///
/// # Errors
/// What is wrong with it.
pub fn parse_action(text: &str) -> Result<Action, ScenarioError> {
    let mut words = Words::new(text);
    action(&mut words)
        .and_then(|a| words.end().map(|()| a))
        .map_err(|problem| ScenarioError {
            line: 1,
            problem,
            text: text.to_owned(),
        })
}

struct Words<'t>(std::iter::Peekable<std::str::SplitWhitespace<'t>>);

impl<'t> Words<'t> {
    fn new(text: &'t str) -> Self {
        Self(text.split_whitespace().peekable())
    }

    fn next(&mut self, what: &str) -> Result<&'t str, String> {
        self.0.next().ok_or_else(|| format!("{what} is missing"))
    }

    fn take_if(&mut self, word: &str) -> bool {
        self.0.next_if(|w| *w == word).is_some()
    }

    fn expect(&mut self, word: &str) -> Result<(), String> {
        match self.0.next() {
            Some(w) if w == word => Ok(()),
            other => Err(format!(
                "'{word}' is expected, not '{}'",
                other.unwrap_or("the end")
            )),
        }
    }

    fn end(&mut self) -> Result<(), String> {
        match self.0.next() {
            None => Ok(()),
            Some(w) => Err(format!("'{w}' is too much")),
        }
    }
}

fn step(line: &str) -> Result<Step, String> {
    let mut words = Words::new(line);
    let when = when(&mut words)?;
    let action = action(&mut words)?;
    words.end()?;
    Ok(Step { when, action })
}

fn when(words: &mut Words<'_>) -> Result<When, String> {
    match words.next("when")? {
        "start" => Ok(When::Start),
        "at" => Ok(When::At(range(words.next("a time")?, duration)?)),
        "every" => {
            let period = range(words.next("a period")?, duration)?;
            let times = match words.0.peek().and_then(|w| w.strip_prefix('x')) {
                None => None,
                Some(n) => {
                    let times = number(n)?;
                    words.0.next();
                    Some(times)
                }
            };
            Ok(When::Every { period, times })
        }
        "after" => {
            let count = range(words.next("a count")?, number)?;
            let what = match words.next("'writes' or 'maps'")? {
                "writes" => Counted::Writes(way(words.next("a direction")?)?),
                "maps" => Counted::Maps(side(words.next("a side")?)?),
                other => return Err(format!("'{other}' is not counted: 'writes' and 'maps' are")),
            };
            Ok(When::After { count, what })
        }
        other => Err(format!(
            "'{other}' is no time: 'start', 'at', 'every' and 'after' are"
        )),
    }
}

fn action(words: &mut Words<'_>) -> Result<Action, String> {
    match words.next("an action")? {
        "link" => match words.next("what the link does")? {
            "down" => Ok(Action::LinkDown),
            "up" => Ok(Action::LinkUp),
            "flap" => Ok(Action::LinkFlap(duration(words.next("how long")?)?)),
            "speed" => Ok(Action::Speed(within(words.next("a speed")?, 1, 6)?)),
            "width" => Ok(Action::Width(within(words.next("a width")?, 1, 32)?)),
            other => Err(format!(
                "the link does not do '{other}': 'down', 'up', 'flap', 'speed' and 'width' it does"
            )),
        },
        "dead" => Ok(Action::Dead {
            from: way(words.next("a direction")?)?,
            dead: true,
        }),
        "alive" => Ok(Action::Dead {
            from: way(words.next("a direction")?)?,
            dead: false,
        }),
        "delay" => Ok(Action::Delay {
            from: way(words.next("a direction")?)?,
            time: duration(words.next("how long")?)?,
        }),
        "spads" => {
            let from = way(words.next("a direction")?)?;
            let what = words.next("'lose' or 'ones'")?;
            let count = number(words.next("how many")?)?;
            match what {
                "lose" => Ok(Action::LoseRegisters { from, count }),
                "ones" => Ok(Action::BlankRegisters { from, count }),
                other => Err(format!("spads do not '{other}': 'lose' and 'ones' are known")),
            }
        }
        "doorbells" => {
            let from = way(words.next("a direction")?)?;
            words.expect("lose")?;
            let count = number(words.next("how many")?)?;
            Ok(Action::LoseDoorbells { from, count })
        }
        "hold" => hold(words),
        "remove" => Ok(Action::Remove(side(words.next("a side")?)?)),
        "return" => Ok(Action::Return(side(words.next("a side")?)?)),
        "error" => Ok(Action::Error {
            side: side(words.next("a side")?)?,
            severity: match words.next("how grave")? {
                "correctable" => Severity::Correctable,
                "nonfatal" => Severity::NonFatal,
                "fatal" => Severity::Fatal,
                other => {
                    return Err(format!(
                        "'{other}' is no severity: 'correctable', 'nonfatal' and 'fatal' are"
                    ));
                }
            },
        }),
        "request" => Ok(Action::RequestRemoval(side(words.next("a side")?)?)),
        "refuse-map" => {
            let side = side(words.next("a side")?)?;
            let nth = number(words.next("which mapping, 1 being the next")?)?;
            let errno = match words.0.next() {
                None | Some("ENOMEM") => Errno::NOMEM,
                Some("EINVAL") => Errno::INVAL,
                Some("ENOSPC") => Errno::NOSPC,
                Some("EPERM") => Errno::PERM,
                Some(other) => {
                    return Err(format!(
                        "'{other}' is no refusal: ENOMEM, EINVAL, ENOSPC and EPERM are"
                    ));
                }
            };
            Ok(Action::RefuseMap { side, nth, errno })
        }
        other => Err(format!("'{other}' is no action")),
    }
}

fn hold(words: &mut Words<'_>) -> Result<Action, String> {
    let from = way(words.next("a direction")?)?;
    if words.take_if("off") {
        return Ok(Action::HoldLines {
            from,
            bytes: 0,
            time: Duration::ZERO,
            every: 0,
        });
    }
    let bytes = within(words.next("how many bytes pass at once")?, 1, 1 << 20)?;
    words.expect("for")?;
    let time = duration(words.next("how long")?)?;
    let every = if words.take_if("every") {
        number(words.next("which stores")?)?.max(1)
    } else {
        1
    };
    Ok(Action::HoldLines {
        from,
        bytes,
        time,
        every,
    })
}

fn side(word: &str) -> Result<SideId, String> {
    match word {
        "a" => Ok(SideId::A),
        "b" => Ok(SideId::B),
        other => Err(format!("'{other}' is no side: 'a' and 'b' are")),
    }
}

/// A direction, by its sender.
fn way(word: &str) -> Result<SideId, String> {
    match word {
        "a>b" => Ok(SideId::A),
        "b>a" => Ok(SideId::B),
        other => Err(format!("'{other}' is no direction: 'a>b' and 'b>a' are")),
    }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("'{word}' is no number"))
}

fn within<T: Copy + FromStr + PartialOrd + std::fmt::Display>(
    word: &str,
    min: T,
    max: T,
) -> Result<T, String> {
    match word.parse() {
        Ok(n) if n >= min && n <= max => Ok(n),
        _ => Err(format!("'{word}' is not a number from {min} to {max}")),
    }
}

/// `10us`, `5ms`, `2s`.
pub(crate) fn duration(word: &str) -> Result<Duration, String> {
    if word == "0" {
        return Ok(Duration::ZERO);
    }
    let micros = [("us", 1), ("ms", 1000), ("s", 1_000_000)];
    micros
        .into_iter()
        .find_map(|(unit, scale)| word.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(scale))
        .map(Duration::from_micros)
        .filter(|d| *d <= Duration::from_secs(86_400))
        .ok_or_else(|| format!("'{word}' is no time of at most a day, such as 10us, 5ms, 2s"))
}

fn range<T: Copy + PartialOrd>(
    word: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Range<T>, String> {
    let (min, max) = word.split_once("..").unwrap_or((word, word));
    let (min, max) = (parse(min)?, parse(max)?);
    if min > max {
        return Err(format!("'{word}' runs backwards"));
    }
    Ok(Range { min, max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood() {
        let text = "
            # a comment
            start delay a>b 5ms
            at 10ms..20ms link flap 2ms   # another
            at 1s link down
            every 50ms x3 hold b>a 24 for 200us every 7
            every 1s..2s link up
            after 100..200 writes a>b remove b
            after 3 maps a refuse-map a 2 ENOSPC
            at 1s spads a>b lose 4
            at 1s spads b>a ones 1
            at 1s doorbells a>b lose 2
            at 1s dead a>b
            at 1s alive a>b
            at 1s error a fatal
            at 1s link width 4
            at 1s link speed 3
            at 1s hold a>b off
            at 1s return b
            at 1s request a
        ";
        let steps = parse(text).unwrap();
        assert_eq!(steps.len(), 18);
        assert_eq!(
            steps[3],
            Step {
                when: When::Every {
                    period: Range {
                        min: Duration::from_millis(50),
                        max: Duration::from_millis(50)
                    },
                    times: Some(3)
                },
                action: Action::HoldLines {
                    from: SideId::B,
                    bytes: 24,
                    time: Duration::from_micros(200),
                    every: 7
                }
            }
        );
        assert_eq!(
            steps[5].when,
            When::After {
                count: Range { min: 100, max: 200 },
                what: Counted::Writes(SideId::A)
            }
        );
    }

    #[test]
    fn bad_lines_are_named() {
        for (text, hint) in [
            ("soon link down", "'soon' is no time"),
            ("at 5 link down", "'5' is no time"),
            ("at 5ms..1ms link down", "runs backwards"),
            ("at 5ms link", "is missing"),
            ("at 5ms link melt", "does not do 'melt'"),
            ("at 5ms dead a", "no direction"),
            ("at 5ms remove c", "no side"),
            ("at 5ms link down now", "too much"),
            ("after 5 sneezes a link down", "not counted"),
            ("at 5ms link width 0", "from 1 to 32"),
            ("at 5ms hold a>b 8", "'for' is expected"),
            ("at 99999999999s link down", "at most a day"),
            ("start refuse-map a 1 EWHAT", "no refusal"),
        ] {
            let e = parse(&format!("\n{text}\n")).unwrap_err();
            assert_eq!(e.line, 2);
            assert!(e.to_string().contains(hint), "{e}");
        }
    }
}
