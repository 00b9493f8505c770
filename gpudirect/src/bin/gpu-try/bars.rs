//! Registering BARs of other devices, without one access to them: the driver's rules about foreign memory, on a machine that has no
//! bridge.

#![allow(unsafe_code, reason = "mapping a BAR")]

use std::{fs::OpenOptions, path::PathBuf, sync::Arc};

use ntb_gpudirect::{
    GpuError,
    aperture::OnGpu,
    seam::{Gpu, HostMemory},
};
use rustix::mm::{MapFlags, ProtFlags};

use super::steps::Seen;

/// Largest BAR that is mapped: a try needs no more.
const MOST: u64 = 16 << 20;
const NVIDIA: &str = "0x10de";

fn folder(address: &str) -> PathBuf {
    PathBuf::from("/sys/bus/pci/devices").join(address)
}

fn text(address: &str, name: &str) -> String {
    let text = std::fs::read_to_string(folder(address).join(name)).unwrap_or_default();
    text.trim().to_owned()
}

/// Bytes of a BAR, where it is one of memory.
pub(crate) fn bytes(address: &str, bar: usize) -> Option<u64> {
    const MEMORY: u64 = 0x200; // IORESOURCE_MEM of linux/ioport.h
    let resource = text(address, "resource");
    let line = resource.lines().nth(bar)?;
    let mut numbers = line
        .split_whitespace()
        .map(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16).unwrap_or(0));
    let (first, last, flags) = (numbers.next()?, numbers.next()?, numbers.next()?);
    (last > first && flags & MEMORY != 0).then(|| last - first + 1)
}

/// A mapped BAR that nobody touches.
struct Bar {
    address: *mut u8,
    bytes: usize,
}

impl Bar {
    fn map(device: &str, bar: usize, bytes: u64) -> Result<Self, String> {
        let path = folder(device).join(format!("resource{bar}"));
        let failed = |e: String| format!("{}: {e}", path.display());
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|e| failed(e.to_string()))?;
        let bytes = bytes.min(MOST) as usize;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let mapped = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                protection,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        let address = mapped.map_err(|e| failed(e.to_string()))?.cast();
        Ok(Self { address, bytes })
    }

    fn register(&self, gpu: &Arc<dyn Gpu>) -> Result<(), GpuError> {
        // SAFETY: mapped until `self` is dropped, which is later than the result; sysfs maps all pages at once, and no reference
        // exists to any.
        unsafe { OnGpu::raw(gpu, self.address, self.bytes as u64, HostMemory::Aperture) }.map(drop)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, unmapped once.
        let _ = unsafe { rustix::mm::munmap(self.address.cast(), self.bytes) };
    }
}

/// Devices with nobody to disturb: no driver, and not a bridge of the bus.
fn inert() -> Vec<(String, usize, u64)> {
    let devices = std::fs::read_dir("/sys/bus/pci/devices")
        .into_iter()
        .flatten()
        .flatten();
    let mut found: Vec<_> = devices
        .map(|d| d.file_name().to_string_lossy().into_owned())
        .filter(|d| text(d, "vendor") != NVIDIA && !text(d, "class").starts_with("0x06"))
        .filter(|d| !folder(d).join("driver").exists())
        .filter_map(|d| (0..6).find_map(|bar| Some((d.clone(), bar, bytes(&d, bar).filter(|b| *b >= 4096)?))))
        .collect();
    found.sort();
    found
}

/// A BAR of a device that nobody uses is registered and given back; the GPU's own must be refused.
pub(crate) fn bars(gpu: &Arc<dyn Gpu>) -> Result<Seen, GpuError> {
    let mut said = Vec::new();
    let mut tried = false;
    for (device, bar, bytes) in inert() {
        match Bar::map(&device, bar, bytes) {
            Err(e) => said.push(e),
            Ok(mapped) => {
                tried = true;
                match mapped.register(gpu) {
                    Ok(()) => said.push(format!("BAR {bar} of {device} registered and given back")),
                    Err(e) if e.name == "gpu-not-permitted" => {
                        said.push(format!("BAR {bar} of {device}: {e}"));
                    }
                    Err(e) => return Err(e),
                }
                break;
            }
        }
    }
    let own = gpu
        .facts()
        .address
        .map(|a| a.to_string())
        .filter(|a| folder(a).exists());
    match own.as_deref().and_then(|a| Some((a, bytes(a, 1)?))) {
        None => said.push("the GPU's own BAR 1 is not told by this machine".into()),
        Some((address, length)) => match Bar::map(address, 1, length) {
            Err(e) => said.push(e),
            Ok(mapped) => {
                tried = true;
                match mapped.register(gpu) {
                    Err(_) => said.push("the GPU's own BAR 1 is refused, as it should be".into()),
                    Ok(()) => {
                        return Err(super::steps::wrong(
                            "the GPU's own BAR 1 was taken for another device's",
                        ));
                    }
                }
            }
        },
    }
    let said = said.join("; ");
    Ok(match tried {
        true => Seen::Pass(said),
        false => Seen::Waived(format!("no BAR could be mapped: {said}")),
    })
}
