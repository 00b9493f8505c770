//! Text to instructions.

use std::collections::HashMap;

/// A parsed file.
#[derive(Debug)]
pub struct Module {
    entries: HashMap<String, Entry>,
}

/// A kernel.
#[derive(Debug)]
pub struct Entry {
    pub(super) code: Vec<Instruction>,
    pub(super) registers: usize,
    pub(super) shared_bytes: usize,
    parameters: Vec<usize>,
}

impl Entry {
    /// Bytes of each parameter, in order.
    pub fn parameter_bytes(&self) -> &[usize] {
        &self.parameters
    }
}

#[derive(Clone, Debug)]
pub(super) struct Instruction {
    /// Predicate, and the value it must have.
    pub(super) guard: Option<(usize, bool)>,
    pub(super) op: Op,
    pub(super) args: Vec<Arg>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    U8,
    U32,
    S32,
    U64,
    S64,
    F32,
    Pred,
}

impl Type {
    pub(super) fn bytes(self) -> u32 {
        match self {
            Self::U8 => 1,
            Self::U32 | Self::S32 | Self::F32 => 4,
            _ => 8,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Global,
    Shared,
    Parameter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Add(Type),
    Sub(Type),
    MulLow(Type),
    MulWide,
    Div(Type),
    And,
    Or,
    Xor,
    Not(Type),
    Neg(Type),
    Shl(Type),
    Shr(Type),
    Bfi(Type),
    Mov,
    Cvt(Type, Type),
    Set(Compare, Type),
    Select,
    Load(Space, Type, bool),
    Store(Space, Type, bool, usize),
    Branch,
    Barrier,
    Return,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Arg {
    Register(usize),
    Number(u64),
    Special(Special),
    /// Base register, if any, and offset.
    Address(Option<usize>, u64),
    Label(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Special {
    Thread,
    Threads,
    Time,
}

impl Module {
    /// Parses a file, or says what of it is not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut shared = Names::default();
        let mut entries = HashMap::new();
        let mut lines = text
            .lines()
            .map(|line| line.split("//").next().unwrap_or("").trim())
            .filter(|line| !line.is_empty());
        while let Some(line) = lines.next() {
            if line.starts_with(".shared") {
                shared.declare(line)?;
            } else if let Some(rest) = line.strip_prefix(".visible .entry ") {
                let name = rest.trim_end_matches('(').to_owned();
                let mut parser = Parser {
                    shared: shared.clone(),
                    ..Parser::default()
                };
                for line in lines.by_ref().take_while(|line| *line != ")") {
                    parser.parameter(line)?;
                }
                for line in lines.by_ref().take_while(|line| *line != "}") {
                    parser
                        .line(line)
                        .map_err(|why| format!("{name}: '{line}': {why}"))?;
                }
                entries.insert(name, parser.finish()?);
            } else if ![".version ", ".target ", ".address_size "]
                .iter()
                .any(|d| line.starts_with(d))
            {
                return Err(format!("'{line}' is not understood"));
            }
        }
        Ok(Self { entries })
    }

    /// A kernel by its name.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.get(name)
    }
}

/// Shared variables, by name.
#[derive(Clone, Debug, Default)]
struct Names {
    places: HashMap<String, u64>,
    bytes: u64,
}

impl Names {
    /// `.shared .align 8 .b8 name[2048];` or `.shared .align 8 .u64 name;`
    fn declare(&mut self, line: &str) -> Result<(), String> {
        let words: Vec<&str> = line.trim_end_matches(';').split_whitespace().collect();
        let [".shared", ".align", _, kind, name] = words[..] else {
            return Err(format!("'{line}' is not understood"));
        };
        let unit = match kind {
            ".b8" => 1,
            ".u32" => 4,
            ".u64" => 8,
            _ => return Err(format!("'{line}': unknown type")),
        };
        let (name, count) = match name.trim_end_matches(']').split_once('[') {
            Some((name, count)) => (name, count.parse::<u64>().map_err(|e| e.to_string())?),
            None => (name, 1),
        };
        self.bytes = self.bytes.next_multiple_of(16);
        self.places.insert(name.to_owned(), self.bytes);
        self.bytes += unit * count;
        Ok(())
    }
}

#[derive(Debug, Default)]
struct Parser {
    shared: Names,
    parameters: Vec<(String, usize)>,
    registers: HashMap<String, usize>,
    labels: HashMap<String, usize>,
    placed: Vec<Option<usize>>,
    code: Vec<Instruction>,
}

impl Parser {
    /// `.param .u64 name,`
    fn parameter(&mut self, line: &str) -> Result<(), String> {
        let words: Vec<&str> = line.trim_end_matches(',').split_whitespace().collect();
        let bytes = match words[..] {
            [".param", ".u64", _] => 8,
            [".param", ".u32", _] => 4,
            _ => return Err(format!("parameter '{line}' is not understood")),
        };
        self.parameters.push((words[2].to_owned(), bytes));
        Ok(())
    }

    fn line(&mut self, line: &str) -> Result<(), String> {
        if line == "{" || line.starts_with(".reg ") || line.starts_with(".pragma ") {
            return Ok(());
        }
        if line.starts_with(".shared ") {
            return self.shared.declare(line);
        }
        if let Some(label) = line.strip_suffix(':') {
            let label = self.label(label);
            self.placed[label] = Some(self.code.len());
            return Ok(());
        }
        let text = line.strip_suffix(';').ok_or("no semicolon")?;
        let (guard, text) = match text.strip_prefix('@') {
            None => (None, text),
            Some(rest) => {
                let (predicate, rest) = rest.split_once(char::is_whitespace).ok_or("no instruction")?;
                let (wanted, name) = match predicate.strip_prefix('!') {
                    Some(name) => (false, name),
                    None => (true, predicate),
                };
                (Some((self.register(name), wanted)), rest.trim())
            }
        };
        let (name, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let parts: Vec<&str> = name.split('.').collect();
        let op = op(&parts).ok_or("unknown instruction")?;
        let args = split(rest)
            .into_iter()
            .map(|arg| self.argument(arg, op))
            .collect::<Result<_, _>>()?;
        self.code.push(Instruction { guard, op, args });
        Ok(())
    }

    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn label(&mut self, name: &str) -> usize {
        let next = self.labels.len();
        let label = *self.labels.entry(name.to_owned()).or_insert(next);
        if label == next {
            self.placed.push(None);
        }
        label
    }

    fn argument(&mut self, text: &str, op: Op) -> Result<Arg, String> {
        let special = match text {
            "%tid.x" => Some(Special::Thread),
            "%ntid.x" => Some(Special::Threads),
            "%globaltimer" => Some(Special::Time),
            _ => None,
        };
        if let Some(special) = special {
            return Ok(Arg::Special(special));
        }
        if let Some(inside) = text.strip_prefix('[') {
            return self.address(inside.trim_end_matches(']'), op);
        }
        if text.starts_with('%') {
            return Ok(Arg::Register(self.register(text)));
        }
        if op == Op::Branch {
            return Ok(Arg::Label(self.label(text)));
        }
        if op == Op::Barrier {
            return Ok(Arg::Number(0));
        }
        if let Some(place) = self.shared.places.get(text) {
            return Ok(Arg::Number(*place));
        }
        number(text)
            .map(Arg::Number)
            .ok_or_else(|| format!("'{text}' is not understood"))
    }

    fn address(&mut self, text: &str, op: Op) -> Result<Arg, String> {
        let (base, offset) = match text.rfind('+') {
            Some(plus) => (&text[..plus], number(&text[plus + 1..]).ok_or("bad offset")?),
            None => (text, 0),
        };
        if base.starts_with('%') {
            return Ok(Arg::Address(Some(self.register(base)), offset));
        }
        if matches!(op, Op::Load(Space::Parameter, ..)) {
            let at = self.parameters.iter().position(|(name, _)| name == base);
            return at
                .map(|i| Arg::Address(None, i as u64))
                .ok_or_else(|| format!("no parameter '{base}'"));
        }
        let place = self
            .shared
            .places
            .get(base)
            .ok_or_else(|| format!("no variable '{base}'"))?;
        Ok(Arg::Address(None, place + offset))
    }

    fn finish(mut self) -> Result<Entry, String> {
        for instruction in &mut self.code {
            for arg in &mut instruction.args {
                if let Arg::Label(label) = arg {
                    *label = self.placed[*label].ok_or("a label that is nowhere")?;
                }
            }
        }
        Ok(Entry {
            code: self.code,
            registers: self.registers.len(),
            shared_bytes: self.shared.bytes.next_multiple_of(8) as usize,
            parameters: self.parameters.into_iter().map(|(_, bytes)| bytes).collect(),
        })
    }
}

/// Arguments; those in braces become several.
fn split(text: &str) -> Vec<&str> {
    text.split(',')
        .map(|arg| arg.trim().trim_start_matches('{').trim_end_matches('}').trim())
        .filter(|arg| !arg.is_empty())
        .collect()
}

fn number(text: &str) -> Option<u64> {
    if let Some(hex) = text.strip_prefix("0f") {
        return u32::from_str_radix(hex, 16).ok().map(u64::from);
    }
    if let Some(hex) = text.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok();
    }
    text.parse::<u64>()
        .ok()
        .or_else(|| text.parse::<i64>().ok().map(i64::cast_unsigned))
}

fn kind(text: &str) -> Option<Type> {
    Some(match text {
        "u8" => Type::U8,
        "u32" | "b32" => Type::U32,
        "s32" => Type::S32,
        "u64" | "b64" => Type::U64,
        "s64" => Type::S64,
        "f32" => Type::F32,
        "pred" => Type::Pred,
        _ => return None,
    })
}

fn op(parts: &[&str]) -> Option<Op> {
    let last = parts.last().copied()?;
    let of = kind(last);
    Some(match *parts {
        ["add", _] | ["add", "rn", "f32"] => Op::Add(of?),
        ["sub", _] => Op::Sub(of?),
        ["mul", "lo", _] => Op::MulLow(of?),
        ["mul", "wide", "u32"] => Op::MulWide,
        ["div", _] => Op::Div(of?),
        ["and", _] => Op::And,
        ["or", _] => Op::Or,
        ["xor", _] => Op::Xor,
        ["not", _] => Op::Not(of?),
        ["neg", _] => Op::Neg(of?),
        ["shl", _] => Op::Shl(of?),
        ["shr", _] => Op::Shr(of?),
        ["bfi", _] => Op::Bfi(of?),
        ["mov", _] | ["cvta", "to", "global", "u64"] => Op::Mov,
        ["cvt", to, _] => Op::Cvt(kind(to)?, of?),
        ["setp", compare, _] => Op::Set(
            match compare {
                "eq" => Compare::Eq,
                "ne" => Compare::Ne,
                "lt" => Compare::Lt,
                "le" => Compare::Le,
                "gt" => Compare::Gt,
                "ge" => Compare::Ge,
                _ => return None,
            },
            of?,
        ),
        ["selp", _] => Op::Select,
        ["ld", "param", _] => Op::Load(Space::Parameter, of?, false),
        ["ld", "shared", _] => Op::Load(Space::Shared, of?, false),
        ["ld", _] | ["ld", "global", _] | ["ld", "relaxed", "sys", "global", _] => {
            Op::Load(Space::Global, of?, false)
        }
        ["ld", "acquire", "sys", "global", _] => Op::Load(Space::Global, of?, true),
        ["st", "shared", _] => Op::Store(Space::Shared, of?, false, 1),
        ["st", "global", "v2", _] => Op::Store(Space::Global, of?, false, 2),
        ["st", _] | ["st", "global", _] | ["st", "relaxed", "sys", "global", _] => {
            Op::Store(Space::Global, of?, false, 1)
        }
        ["st", "release", "sys", "global", _] => Op::Store(Space::Global, of?, true, 1),
        ["bra"] | ["bra", "uni"] => Op::Branch,
        ["bar", "sync"] => Op::Barrier,
        ["ret"] => Op::Return,
        _ => return None,
    })
}
