//! Linux PCI endpoint with the NTB function.
//!
//! Everything goes through a control block that firmware polls: write argument and command, wait for the
//! status. There is no hardware doorbell status and no mask; both are kept here.

mod doorbells;

use std::{
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use self::doorbells::SoftDoorbells;
use super::{
    Family, LinkReport, LinkState, NtbError, NtbPort, Role, WindowInfo,
    access::Regs,
    check_doorbells, check_translation,
    family::EpfLayout,
    inferred::EPF_COMMAND,
    peer_answered,
    regs::{Reg, Rw, epf as r},
};
use crate::pci::{
    EventFd, Function, PciFunction,
    config::{self, LinkRate},
};

#[derive(Debug)]
pub(super) struct Epf {
    regs: Regs,
    layout: &'static EpfLayout,
    windows: Vec<WindowInfo>,
    vectors: u16,
    scratchpads: usize,
    own_scratchpads: u64,
    peer_scratchpads: u64,
    entry_bytes: u64,
    doorbells: SoftDoorbells,
    link: EventFd,
    /// One command at a time.
    commands: Mutex<()>,
}

impl Epf {
    pub(super) fn open(function: &Arc<dyn PciFunction>, family: Family) -> Result<Self, NtbError> {
        let Family::Epf { layout } = family else {
            let identity = config::identity(&**function)?;
            let device = function.name().to_owned();
            return Err(NtbError::NotAnNtb { device, identity });
        };
        let regs = Regs::new(Arc::clone(function), family)?;
        let wrong = |what, value: u32| NtbError::BadControlBlock {
            what,
            value: value.into(),
        };
        let windows = windows(&regs, layout)?;
        let count = regs.read_live(r::SPAD_COUNT)?;
        let start = regs.read_live(r::SPAD_OFFSET)?;
        if count == 0 || count > 1024 {
            return Err(wrong("the number of scratchpads", count));
        }
        if start < r::MAP.end || !start.is_multiple_of(4) {
            return Err(wrong("the offset of the scratchpads", start));
        }
        let (own, bytes) = (u64::from(start), u64::from(count) * 4);
        let shared = layout.peer_scratchpads == layout.config;
        let peer = if shared { own + bytes } else { 0 };
        function.check_access(layout.config, own, bytes)?;
        function.check_access(layout.peer_scratchpads, peer, bytes)?;
        let entry = regs.read_live(r::DB_ENTRY_SIZE)?;
        let vectors = function.vectors().min(r::MSIX_VECTORS_MAX);
        if vectors < r::MSIX_VECTORS_MIN {
            return Err(NtbError::TooSmall {
                device: function.name().to_owned(),
                what: "the number of MSI-X vectors",
                needed: r::MSIX_VECTORS_MIN.into(),
                available: vectors.into(),
            });
        }
        Ok(Self {
            regs,
            layout,
            windows,
            vectors,
            scratchpads: count as usize,
            own_scratchpads: own,
            peer_scratchpads: peer,
            entry_bytes: entry.into(),
            doorbells: SoftDoorbells::new(u32::from(vectors) - r::SLOT_DOORBELL0)?,
            link: EventFd::new()?,
            commands: Mutex::new(()),
        })
    }

    fn connect_interrupts(&self) -> Result<(), NtbError> {
        let mut vectors = vec![(r::SLOT_LINK as u16, self.link.as_fd())];
        vectors.extend(self.doorbells.events().enumerate().map(|(bit, event)| {
            let slot = r::SLOT_DOORBELL0 + bit as u32;
            (slot as u16, event.as_fd())
        }));
        Ok(self.function().set_vectors(&vectors)?)
    }

    fn command(&self, command: u32, argument: u32) -> Result<(), NtbError> {
        let _one = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        self.command_locked(command, argument)
    }

    fn command_locked(&self, command: u32, argument: u32) -> Result<(), NtbError> {
        self.regs.write(r::CMD_STATUS, 0)?;
        self.regs.write(r::ARGUMENT, argument)?;
        self.regs.write(r::COMMAND, command)?;
        let start = Instant::now();
        let failed = |outcome| NtbError::Firmware {
            command: command_name(command),
            argument,
            outcome,
            waited: start.elapsed(),
        };
        loop {
            match self.regs.read_live(r::CMD_STATUS)? {
                r::STATUS_OK => break,
                r::STATUS_ERROR => {
                    self.regs.write(r::CMD_STATUS, 0)?;
                    return Err(failed("refused"));
                }
                _ if start.elapsed() > EPF_COMMAND => return Err(failed("did not answer")),
                // Firmware looks every 5 ms.
                _ => std::thread::sleep(Duration::from_micros(500)),
            }
        }
        Ok(self.regs.write(r::CMD_STATUS, 0)?)
    }

    fn spad(&self, base: u64, index: usize) -> Result<u64, NtbError> {
        if index >= self.scratchpads {
            return Err(NtbError::BadScratchpad {
                index,
                count: self.scratchpads,
            });
        }
        Ok(base + 4 * index as u64)
    }

    /// Writes the address and size of the window that the next command is about.
    fn describe_window(&self, iova: u64, bytes: u64) -> Result<(), NtbError> {
        let halves: [(Reg<u32, Rw>, u64); 4] = [
            (r::LOWER_ADDR, iova),
            (r::UPPER_ADDR, iova >> 32),
            (r::LOWER_SIZE, bytes),
            (r::UPPER_SIZE, bytes >> 32),
        ];
        for (reg, value) in halves {
            self.regs
                .write_back(reg, value as u32, "the control block is not memory")?;
        }
        Ok(())
    }
}

impl Drop for Epf {
    fn drop(&mut self) {
        super::end(self);
    }
}

fn windows(regs: &Regs, layout: &EpfLayout) -> Result<Vec<WindowInfo>, NtbError> {
    let count = regs.read_live(r::MW_COUNT)?;
    if count == 0 || count > r::MW_MAX {
        return Err(NtbError::BadControlBlock {
            what: "the number of memory windows",
            value: count.into(),
        });
    }
    let first = u64::from(regs.read_live(r::MW1_OFFSET)?);
    let mut windows = Vec::new();
    for (i, &bar) in layout.windows.iter().take(count as usize).enumerate() {
        let all = regs.function().bar_or_error(bar)?.bytes;
        let offset = if i == 0 { first } else { 0 };
        let bytes = all
            .checked_sub(offset)
            .filter(|b| *b > 0 && offset.is_multiple_of(4096));
        windows.push(WindowInfo {
            bar,
            offset,
            bytes: bytes.ok_or(NtbError::BadControlBlock {
                what: "the offset of memory window 0",
                value: offset,
            })?,
            address_align: 4096,
            size_align: 4096,
        });
    }
    Ok(windows)
}

fn command_name(command: u32) -> &'static str {
    match command {
        r::CMD_CONFIGURE_DOORBELL => "configure doorbell",
        r::CMD_TEARDOWN_DOORBELL => "tear down doorbell",
        r::CMD_CONFIGURE_MW => "configure memory window",
        r::CMD_TEARDOWN_MW => "tear down memory window",
        r::CMD_LINK_UP => "link up",
        _ => "link down",
    }
}

/// Firmware refuses to undo what was never done: that is as good as done.
fn refusal_is_fine(result: Result<(), NtbError>) -> Result<(), NtbError> {
    match result {
        Err(NtbError::Firmware {
            outcome: "refused", ..
        }) => Ok(()),
        other => other,
    }
}

impl NtbPort for Epf {
    fn family(&self) -> Family {
        Family::Epf { layout: self.layout }
    }

    fn function(&self) -> &Arc<dyn PciFunction> {
        self.regs.function()
    }

    fn role(&self) -> Role {
        Role::Symmetric
    }

    fn enable_link(&self) -> Result<(), NtbError> {
        self.command(r::CMD_LINK_UP, 0)
    }

    fn disable_link(&self) -> Result<(), NtbError> {
        self.command(r::CMD_LINK_DOWN, 0)
    }

    fn link(&self) -> Result<LinkState, NtbError> {
        if self.regs.read_live(r::LINK_STATUS)? & r::LINK_UP == 0 {
            return Ok(LinkState::Down);
        }
        let link = config::pcie_link(&**self.function())?.and_then(|l| l.current);
        Ok(LinkState::Up(link.unwrap_or(LinkRate::from_bits(0))))
    }

    fn take_link_report(&self) -> Result<LinkReport, NtbError> {
        let interrupts = self.link.take()?;
        Ok(LinkReport {
            state: self.link()?,
            interrupts,
            peer_left: false,
        })
    }

    fn link_event(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }

    fn windows(&self) -> &[WindowInfo] {
        &self.windows
    }

    fn open_window(&self, window: usize, iova: u64, bytes: u64) -> Result<(), NtbError> {
        check_translation(&self.windows, window, iova, bytes)?;
        let _one = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        self.describe_window(iova, bytes)?;
        self.command_locked(r::CMD_CONFIGURE_MW, window as u32)
    }

    fn close_window(&self, window: usize) -> Result<(), NtbError> {
        super::window(&self.windows, window)?;
        refusal_is_fine(self.command(r::CMD_TEARDOWN_MW, window as u32))
    }

    fn doorbell_bits(&self) -> u64 {
        self.doorbells.valid()
    }

    fn ring_peer(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        for bit in (0..64u32).filter(|b| bits >> b & 1 != 0) {
            let slot = (r::SLOT_DOORBELL0 + bit) as usize;
            let (Some(data), Some(offset)) = (r::DB_DATA.get(slot), r::DB_OFFSET.get(slot)) else {
                continue;
            };
            let at = self.entry_bytes * slot as u64 + u64::from(self.regs.read_live(offset)?);
            let value: u32 = self.regs.read(data)?;
            self.function().write(self.layout.doorbells, at, value)?;
        }
        Ok(())
    }

    fn doorbells(&self) -> Result<u64, NtbError> {
        self.doorbells.pending()
    }

    fn clear_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        self.doorbells.clear(bits)
    }

    fn mask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        self.doorbells.mask(bits)
    }

    fn unmask_doorbells(&self, bits: u64) -> Result<(), NtbError> {
        check_doorbells(bits, self.doorbell_bits())?;
        self.doorbells.unmask(bits)
    }

    fn masked_doorbells(&self) -> u64 {
        self.doorbells.masked()
    }

    fn doorbell_event(&self) -> BorrowedFd<'_> {
        self.doorbells.as_fd()
    }

    fn take_doorbells(&self, bits: u64) -> Result<u64, NtbError> {
        self.doorbells.take(bits)
    }

    fn scratchpads(&self) -> usize {
        self.scratchpads
    }

    fn scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        let value = self
            .function()
            .read(self.layout.config, self.spad(self.own_scratchpads, index)?)?;
        if value == u32::MAX {
            self.regs.read_live(r::MW_COUNT)?;
        }
        Ok(value)
    }

    fn set_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        let at = self.spad(self.own_scratchpads, index)?;
        Ok(self.function().write(self.layout.config, at, value)?)
    }

    fn peer_scratchpad(&self, index: usize) -> Result<u32, NtbError> {
        let at = self.spad(self.peer_scratchpads, index)?;
        let value = self.function().read(self.layout.peer_scratchpads, at)?;
        peer_answered(self, value)
    }

    fn set_peer_scratchpad(&self, index: usize, value: u32) -> Result<(), NtbError> {
        let at = self.spad(self.peer_scratchpads, index)?;
        Ok(self.function().write(self.layout.peer_scratchpads, at, value)?)
    }

    fn quiesce(&self) -> Result<(), NtbError> {
        self.regs.read_live(r::MW_COUNT)?;
        self.mask_doorbells(self.doorbell_bits())?;
        refusal_is_fine(self.disable_link())?;
        for window in 0..self.windows.len() {
            self.close_window(window)?;
        }
        for index in 0..self.scratchpads {
            self.set_scratchpad(index, 0)?;
        }
        refusal_is_fine(self.command(r::CMD_TEARDOWN_DOORBELL, 0))?;
        self.connect_interrupts()?;
        self.command(r::CMD_CONFIGURE_DOORBELL, u32::from(self.vectors) | r::ARG_MSIX)?;
        self.clear_doorbells(self.doorbell_bits())?;
        self.link.take()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::{
        Bar,
        fake::{Fake, FakeConfig, RegisterFile},
    };

    /// Firmware that refuses to set up a window, and to take down what was never set up.
    #[test]
    fn refusals_of_the_firmware_are_errors_where_something_was_to_be_done() {
        const BYTES: u64 = 1 << 16;
        let registers = RegisterFile::new(&r::MAP, BYTES as usize)
            .preset(r::MW_COUNT, 1)
            .preset(r::SPAD_OFFSET, 0x200)
            .preset(r::SPAD_COUNT, 16)
            .on_write(|registers, offset, _, command| {
                if offset == u64::from(r::COMMAND.offset()) {
                    let refused = [r::CMD_CONFIGURE_MW, r::CMD_TEARDOWN_MW].contains(&(command as u32));
                    let status = if refused { r::STATUS_ERROR } else { r::STATUS_OK };
                    registers.set(r::CMD_STATUS, status);
                }
            });
        let config = FakeConfig::new("epf", 0x1912, 0x0030)
            .class(r::CLASS)
            .vectors(32)
            .bar(Bar::B0, BYTES)
            .bar(Bar::B2, BYTES)
            .bar(Bar::B4, BYTES);
        let function: Arc<dyn PciFunction> = Fake::new(config, registers);
        let port = super::super::open(&function).unwrap();
        let e = port.open_window(0, 0x10_0000, 4096).unwrap_err();
        assert!(
            matches!(
                e,
                NtbError::Firmware {
                    command: "configure memory window",
                    outcome: "refused",
                    ..
                }
            ),
            "{e}"
        );
        port.close_window(0).unwrap();
    }
}
