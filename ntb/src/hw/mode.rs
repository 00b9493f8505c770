//! Which mode a port is in, by the register that says so. Only back-to-back NTBs can be driven.

use super::{
    Family, NtbError, Role,
    regs::{intel_gen3, intel_gen4},
};

/// A mode that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongMode {
    /// The mode, with the register's value.
    pub found: String,
    /// The setting that is needed.
    pub remedy: &'static str,
}

impl WrongMode {
    /// The error of the port of this name.
    pub fn of(self, device: &str) -> NtbError {
        NtbError::WrongMode {
            device: device.to_owned(),
            found: self.found,
            remedy: self.remedy,
        }
    }
}

/// Skylake, by its PPD in configuration space.
pub fn intel_gen3(ppd: u8) -> Result<Role, WrongMode> {
    use intel_gen3 as r;
    let wrong = |what: &str| {
        Err(WrongMode {
            found: format!("PPD is {ppd:#x}{what}"),
            remedy: "In the firmware set-up, choose 'NTB to NTB' for this PCIe port on both hosts, with BARs not \
                     split, upstream on one and downstream on the other",
        })
    };
    if ppd & r::PPD_SPLIT != 0 {
        return wrong(": its BARs are split into 32-bit halves");
    }
    match ppd & r::PPD_MASK {
        r::PPD_B2B_USD => Ok(Role::Upstream),
        r::PPD_B2B_DSD => Ok(Role::Downstream),
        other if other & 3 == r::PPD_CONN_TRANSPARENT => wrong(": a transparent port"),
        other if other & 3 == r::PPD_CONN_RP => wrong(": NTB to root port"),
        _ => wrong(", which no manual lists"),
    }
}

/// Ice Lake and later, by PPD1.
pub fn intel_gen4(family: Family, ppd1: u32) -> Result<Role, WrongMode> {
    use intel_gen4 as r;
    let (mask, usd, dsd) = match family {
        Family::IntelIcx => (r::ICX_PPD1_MASK, r::ICX_PPD1_B2B_USD, r::ICX_PPD1_B2B_DSD),
        _ => (r::SPR_PPD1_MASK, r::SPR_PPD1_B2B_USD, r::SPR_PPD1_B2B_DSD),
    };
    match ppd1 & mask {
        v if v == usd => Ok(Role::Upstream),
        v if v == dsd => Ok(Role::Downstream),
        _ => Err(WrongMode {
            found: format!("PPD1 is {ppd1:#x}, which is not a back-to-back NTB"),
            remedy: "In the firmware set-up, choose 'NTB to NTB' for this PCIe port on both hosts, upstream on one and \
                     downstream on the other",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_back_to_back_ports_are_taken() {
        assert_eq!(intel_gen3(0x01), Ok(Role::Upstream));
        assert_eq!(intel_gen3(0x11), Ok(Role::Downstream));
        for (ppd, word) in [
            (0x00, "transparent"),
            (0x02, "root port"),
            (0x41, "split"),
            (0x03, "no manual"),
        ] {
            assert!(intel_gen3(ppd).unwrap_err().found.contains(word), "{ppd:#x}");
        }
        assert_eq!(intel_gen4(Family::IntelSpr, 0x0200), Ok(Role::Upstream));
        assert_eq!(intel_gen4(Family::IntelSpr, 0x4200), Ok(Role::Downstream));
        assert_eq!(intel_gen4(Family::IntelIcx, 0x1200), Ok(Role::Downstream));
        assert!(
            intel_gen4(Family::IntelIcx, 0x0100)
                .unwrap_err()
                .found
                .contains("0x100")
        );
        assert!(intel_gen4(Family::IntelSpr, 0x0300).is_err());
    }
}
