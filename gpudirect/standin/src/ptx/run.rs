//! Instructions to effects.

use std::{sync::atomic::Ordering, time::Instant};

use super::{
    Fault, Memory, Module,
    parse::{Arg, Compare, Entry, Instruction, Op, Space, Special, Type},
};

/// Looks between two times that other threads of the machine get a chance: two ends may share one processor.
const YIELD_EVERY: u64 = 256;

struct Thread {
    number: u64,
    registers: Vec<u64>,
    at: usize,
    state: At,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum At {
    Running,
    Barrier,
    End,
}

struct Block<'a> {
    entry: &'a Entry,
    arguments: &'a [u64],
    threads: u64,
    shared: Vec<u64>,
    memory: &'a dyn Memory,
    start: Instant,
    looks: u64,
}

/// Runs one block of `threads` threads to its end.
pub fn run(
    module: &Module,
    name: &str,
    threads: u32,
    arguments: &[u64],
    memory: &dyn Memory,
) -> Result<(), Fault> {
    let entry = module
        .entry(name)
        .ok_or_else(|| Fault::Call(format!("no kernel {name}")))?;
    if arguments.len() != entry.parameter_bytes().len() {
        return Err(Fault::Call(format!(
            "{name} takes {} arguments, {} were given",
            entry.parameter_bytes().len(),
            arguments.len()
        )));
    }
    let mut block = Block {
        entry,
        arguments,
        threads: threads.into(),
        shared: vec![0; entry.shared_bytes / 8],
        memory,
        start: Instant::now(),
        looks: 0,
    };
    let mut all: Vec<Thread> = (0..u64::from(threads))
        .map(|number| Thread {
            number,
            registers: vec![0; entry.registers],
            at: 0,
            state: At::Running,
        })
        .collect();
    loop {
        for thread in &mut all {
            while thread.state == At::Running {
                block.step(thread)?;
            }
        }
        if all.iter().all(|t| t.state == At::End) {
            return Ok(());
        }
        if all.iter().any(|t| t.state == At::End) {
            return Err(Fault::Barrier);
        }
        for thread in &mut all {
            thread.state = At::Running;
        }
    }
}

impl Block<'_> {
    fn step(&mut self, t: &mut Thread) -> Result<(), Fault> {
        let Some(instruction) = self.entry.code.get(t.at) else {
            t.state = At::End;
            return Ok(());
        };
        t.at += 1;
        if let Some((predicate, wanted)) = instruction.guard
            && (t.registers[predicate] != 0) != wanted
        {
            return Ok(());
        }
        self.execute(instruction, t)
    }

    fn value(&self, arg: &Arg, t: &Thread) -> u64 {
        match arg {
            Arg::Register(r) => t.registers[*r],
            Arg::Number(n) => *n,
            Arg::Address(base, offset) => base.map_or(0, |r| t.registers[r]).wrapping_add(*offset),
            Arg::Special(Special::Thread) => t.number,
            Arg::Special(Special::Threads) => self.threads,
            Arg::Special(Special::Time) => self.start.elapsed().as_nanos() as u64,
            Arg::Label(at) => *at as u64,
        }
    }

    fn execute(&mut self, i: &Instruction, t: &mut Thread) -> Result<(), Fault> {
        let v = |n: usize| i.args.get(n).map_or(0, |arg| self.value(arg, t));
        let result = match i.op {
            Op::Add(Type::F32) => {
                u64::from((f32::from_bits(v(1) as u32) + f32::from_bits(v(2) as u32)).to_bits())
            }
            Op::Add(ty) => cut(v(1).wrapping_add(v(2)), ty),
            Op::Sub(ty) => cut(v(1).wrapping_sub(v(2)), ty),
            Op::MulLow(ty) => cut(v(1).wrapping_mul(v(2)), ty),
            Op::MulWide => (v(1) & 0xffff_ffff) * (v(2) & 0xffff_ffff),
            Op::Div(ty) => cut(v(1), ty).checked_div(cut(v(2), ty)).ok_or(Fault::Division)?,
            Op::And => v(1) & v(2),
            Op::Or => v(1) | v(2),
            Op::Xor => v(1) ^ v(2),
            Op::Not(Type::Pred) => u64::from(v(1) == 0),
            Op::Not(ty) => cut(!v(1), ty),
            Op::Neg(ty) => cut(v(1).wrapping_neg(), ty),
            Op::Shl(ty) => match cut(v(2), Type::U32) {
                by if by >= u64::from(ty.bytes()) * 8 => 0,
                by => cut(v(1) << by, ty),
            },
            Op::Shr(ty) => shifted_right(v(1), cut(v(2), Type::U32), ty),
            Op::Bfi(ty) => {
                let (position, length) = (v(3) & 0xff, v(4) & 0xff);
                let field = match length {
                    64.. => u64::MAX,
                    n => (1 << n) - 1,
                };
                let (mask, bits) = match position {
                    64.. => (0, 0),
                    p => (field << p, v(1) << p),
                };
                cut(v(2) & !mask | bits & mask, ty)
            }
            Op::Mov => v(1),
            Op::Cvt(to, from) => cut(widened(v(1), from), to),
            Op::Set(compare, ty) => u64::from(compared(compare, v(1), v(2), ty)),
            Op::Select => {
                if v(3) != 0 {
                    v(1)
                } else {
                    v(2)
                }
            }
            Op::Load(Space::Parameter, ..) => self.arguments[v(1) as usize],
            Op::Load(Space::Shared, ty, _) => self.load_shared(v(1), ty)?,
            Op::Load(Space::Global, ty, acquire) => {
                let at = v(1);
                if acquire {
                    self.looks += 1;
                    if self.looks.is_multiple_of(YIELD_EVERY) {
                        std::thread::yield_now();
                    }
                }
                let order = if acquire {
                    Ordering::Acquire
                } else {
                    Ordering::Relaxed
                };
                self.memory.load(at, ty.bytes(), order)?
            }
            Op::Store(Space::Shared, ty, ..) => {
                let (at, value) = (v(0), v(1));
                return self.store_shared(at, cut(value, ty), ty);
            }
            Op::Store(_, ty, release, count) => {
                let order = if release {
                    Ordering::Release
                } else {
                    Ordering::Relaxed
                };
                for n in 0..count {
                    let at = v(0) + n as u64 * u64::from(ty.bytes());
                    self.memory.store(at, ty.bytes(), cut(v(1 + n), ty), order)?;
                }
                return Ok(());
            }
            Op::Branch => {
                t.at = v(0) as usize;
                return Ok(());
            }
            Op::Barrier => {
                t.state = At::Barrier;
                return Ok(());
            }
            Op::Return => {
                t.state = At::End;
                return Ok(());
            }
        };
        if let Some(Arg::Register(to)) = i.args.first() {
            t.registers[*to] = result;
        }
        Ok(())
    }

    fn shared_word(&self, at: u64, ty: Type, store: bool) -> Result<usize, Fault> {
        let bytes = ty.bytes();
        let word = (at / 8) as usize;
        if word < self.shared.len() && at.is_multiple_of(bytes.into()) {
            return Ok(word);
        }
        Err(Fault::Address { at, bytes, store })
    }

    fn load_shared(&self, at: u64, ty: Type) -> Result<u64, Fault> {
        let word = self.shared[self.shared_word(at, ty, false)?];
        Ok(cut(word >> (at % 8 * 8), ty))
    }

    fn store_shared(&mut self, at: u64, value: u64, ty: Type) -> Result<(), Fault> {
        let word = self.shared_word(at, ty, true)?;
        let shift = at % 8 * 8;
        let mask = cut(u64::MAX, ty) << shift;
        self.shared[word] = self.shared[word] & !mask | value << shift;
        Ok(())
    }
}

/// The bits that a register of this type keeps.
fn cut(value: u64, ty: Type) -> u64 {
    match ty.bytes() {
        1 => value & 0xff,
        4 => value & 0xffff_ffff,
        _ => value,
    }
}

fn widened(value: u64, from: Type) -> u64 {
    match from {
        Type::S32 => i64::from(value as i32).cast_unsigned(),
        _ => cut(value, from),
    }
}

fn shifted_right(value: u64, by: u64, ty: Type) -> u64 {
    let bits = u64::from(ty.bytes()) * 8;
    match ty {
        Type::S32 => cut(i64::from((value as i32) >> by.min(31)).cast_unsigned(), ty),
        Type::S64 => (value.cast_signed() >> by.min(63)).cast_unsigned(),
        _ if by >= bits => 0,
        _ => cut(value, ty) >> by,
    }
}

fn compared(compare: Compare, a: u64, b: u64, ty: Type) -> bool {
    let order = match ty {
        Type::S32 => (a as i32).cmp(&(b as i32)),
        Type::S64 => a.cast_signed().cmp(&b.cast_signed()),
        _ => cut(a, ty).cmp(&cut(b, ty)),
    };
    match compare {
        Compare::Eq => order.is_eq(),
        Compare::Ne => order.is_ne(),
        Compare::Lt => order.is_lt(),
        Compare::Le => order.is_le(),
        Compare::Gt => order.is_gt(),
        Compare::Ge => order.is_ge(),
    }
}
