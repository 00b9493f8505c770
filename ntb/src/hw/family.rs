//! Which bridges are known, by PCI id.

use super::{
    inferred::{ICX_FIRST_REVISION, SPR_FIRST_REVISION},
    regs::{amd, epf, intel_gen3, intel_gen4},
};
use crate::pci::{Bar, config::Identity};

/// A family of NTB hardware: one register file and one way to drive it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Intel Skylake and Cascade Lake ("Gen3").
    IntelSkx,
    /// Intel Ice Lake.
    IntelIcx,
    /// Intel Sapphire Rapids and Emerald Rapids.
    IntelSpr,
    /// Intel Granite Rapids.
    IntelGnr,
    /// AMD and Hygon.
    Amd {
        /// BARs of the memory windows.
        windows: &'static [Bar],
    },
    /// A Linux PCI endpoint that offers the NTB function.
    Epf {
        /// Which BAR holds what.
        layout: &'static EpfLayout,
    },
}

/// Which BAR of an endpoint holds what.
#[derive(Debug, PartialEq, Eq)]
pub struct EpfLayout {
    /// Control block and own scratchpads.
    pub config: Bar,
    /// The peer's scratchpads; in [`EpfLayout::config`] they stand behind the own ones.
    pub peer_scratchpads: Bar,
    /// Doorbells.
    pub doorbells: Bar,
    /// Memory windows; the first shares its BAR with the doorbells where the two are the same.
    pub windows: &'static [Bar],
}

const AMD_THREE: &[Bar] = &[Bar::B1, Bar::B2, Bar::B4];
const AMD_TWO: &[Bar] = &[Bar::B2, Bar::B4];
const EPF_TI: EpfLayout = EpfLayout {
    config: Bar::B0,
    peer_scratchpads: Bar::B1,
    doorbells: Bar::B2,
    windows: &[Bar::B2, Bar::B3, Bar::B4, Bar::B5],
};
const EPF_NXP: EpfLayout = EpfLayout {
    config: Bar::B0,
    peer_scratchpads: Bar::B0,
    doorbells: Bar::B2,
    windows: &[Bar::B4, Bar::B5],
};
const EPF_RENESAS: EpfLayout = EpfLayout {
    config: Bar::B0,
    peer_scratchpads: Bar::B0,
    doorbells: Bar::B4,
    windows: &[Bar::B2],
};

/// Ids that are NTBs but not driven here, with the reason.
const KNOWN_UNSUPPORTED: &[(u16, &[u16], &str)] = &[
    (
        0x8086,
        &[
            0x3725, 0x3726, 0x3727, 0x3C0D, 0x3C0E, 0x3C0F, 0x0E0D, 0x0E0E, 0x0E0F, 0x2F0D, 0x2F0E, 0x2F0F,
            0x6F0D, 0x6F0E, 0x6F0F,
        ],
        "Intel NTBs before Skylake lock up when doorbells are rung under load, and are not supported",
    ),
    (
        0x8086,
        &[0x7868],
        "Diamond Rapids has its link training register elsewhere, and is not supported yet",
    ),
];

/// Makers of Switchtec switches: Microsemi, Microchip.
const SWITCHTEC_VENDORS: [u16; 2] = [0x11F8, 0x1055];

impl Family {
    /// The family of a function; `None` when it is no NTB that can be driven here.
    pub fn of(id: &Identity) -> Option<Self> {
        // The endpoint framework's ids are shared with other devices of the vendors: the class tells.
        let endpoint = |layout| (id.class >> 8 == epf::CLASS >> 8).then_some(Self::Epf { layout });
        match (id.vendor, id.device) {
            (0x8086, 0x201C) => Some(Self::IntelSkx),
            (0x8086, 0x347E) if id.revision >= SPR_FIRST_REVISION => Some(Self::IntelSpr),
            (0x8086, 0x347E) if id.revision >= ICX_FIRST_REVISION => Some(Self::IntelIcx),
            (0x8086, 0x0DB4) => Some(Self::IntelGnr),
            (0x1022 | 0x1D94, 0x145B) => Some(Self::Amd { windows: AMD_THREE }),
            (0x1022, 0x148B | 0x14C0 | 0x14C3 | 0x155A | 0x17D4 | 0x17D7) => {
                Some(Self::Amd { windows: AMD_TWO })
            }
            (0x104C, 0xB00D) => endpoint(&EPF_TI),
            (0x1957, 0x0809) => endpoint(&EPF_NXP),
            (0x1912, 0x0030) => endpoint(&EPF_RENESAS),
            _ => None,
        }
    }

    /// Why a function that is an NTB is not driven here; `None` for everything else.
    pub fn why_unsupported(id: &Identity) -> Option<&'static str> {
        if (id.vendor, id.device) == (0x8086, 0x347E) && id.revision < ICX_FIRST_REVISION {
            return Some("device 347e below revision 2 is an early Ice Lake sample, which no driver knows");
        }
        // Switches show many functions under one id: the class tells the NTB endpoint.
        if SWITCHTEC_VENDORS.contains(&id.vendor) && id.class >> 8 == 0x06_80 {
            return Some(
                "Switchtec bridges take commands of their own instead of registers, and are not supported yet",
            );
        }
        KNOWN_UNSUPPORTED
            .iter()
            .find(|(vendor, devices, _)| *vendor == id.vendor && devices.contains(&id.device))
            .map(|(_, _, why)| *why)
    }

    /// The BAR of its registers, and how far into it they reach.
    pub fn registers(self) -> (Bar, u64) {
        match self {
            Self::IntelSkx => (Bar::B0, intel_gen3::MAP.end.into()),
            Self::IntelIcx | Self::IntelSpr | Self::IntelGnr => {
                (Bar::B0, u64::from(intel_gen4::PPD1.offset()) + 4)
            }
            Self::Amd { .. } => (Bar::B0, amd::BAR0_BYTES),
            Self::Epf { layout } => (layout.config, epf::MAP.end.into()),
        }
    }

    /// BARs of its memory windows.
    pub fn window_bars(self) -> &'static [Bar] {
        match self {
            Self::IntelSkx | Self::IntelIcx | Self::IntelSpr | Self::IntelGnr => &[Bar::B2, Bar::B4],
            Self::Amd { windows } => windows,
            Self::Epf { layout } => layout.windows,
        }
    }

    /// Short name, as the emulator's and the tools' options have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::IntelSkx => "intel-skx",
            Self::IntelIcx => "intel-icx",
            Self::IntelSpr => "intel-spr",
            Self::IntelGnr => "intel-gnr",
            Self::Amd { .. } => "amd",
            Self::Epf { .. } => "epf",
        }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(vendor: u16, device: u16, revision: u8, class: u32) -> Identity {
        Identity {
            vendor,
            device,
            revision,
            class,
        }
    }

    #[test]
    fn ice_lake_and_sapphire_rapids_are_told_apart_by_revision() {
        let family = |revision| Family::of(&id(0x8086, 0x347E, revision, 0x06_8000));
        assert_eq!(family(0x01), None);
        assert_eq!(family(0x02), Some(Family::IntelIcx));
        assert_eq!(family(0x0F), Some(Family::IntelIcx));
        assert_eq!(family(0x10), Some(Family::IntelSpr));
        assert!(Family::why_unsupported(&id(0x8086, 0x347E, 1, 0)).is_some());
    }

    #[test]
    fn a_switch_is_a_bridge_by_its_class_only() {
        for vendor in [0x11F8, 0x1055] {
            let why = |class| Family::why_unsupported(&id(vendor, 0x8546, 0, class));
            assert!(why(0x06_8000).is_some_and(|why| why.contains("Switchtec")));
            assert_eq!((why(0x05_8000), why(0x06_0400)), (None, None), "management, port");
        }
        assert_eq!(Family::why_unsupported(&id(0x8086, 0x1234, 0, 0x06_8000)), None);
    }

    #[test]
    fn an_endpoint_is_known_by_its_class_too() {
        assert!(Family::of(&id(0x1957, 0x0809, 0, 0x05_0000)).is_some());
        assert_eq!(
            Family::of(&id(0x1957, 0x0809, 0, 0x06_0400)),
            None,
            "a bridge with the same id"
        );
    }
}
