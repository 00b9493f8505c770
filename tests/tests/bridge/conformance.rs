//! The conformance suite of links, on every family and for every way in which a link is lost. A new family is one line.

use crate::rig::{Joined, Trouble};

macro_rules! families {
    ($($module:ident: $family:literal;)*) => {$(
        mod $module {
            use super::*;

            mod cable {
                use super::*;
                ntb_ring::link_conformance!(Joined::new($family, Trouble::Cable));
            }
            mod peer {
                use super::*;
                ntb_ring::link_conformance!(Joined::new($family, Trouble::Peer));
            }
            mod near_device {
                use super::*;
                ntb_ring::link_conformance!(Joined::new($family, Trouble::NearDevice));
            }
            mod far_device {
                use super::*;
                ntb_ring::link_conformance!(Joined::new($family, Trouble::FarDevice));
            }
        }
    )*};
}

families! {
    intel_spr: "intel-spr";
    intel_icx: "intel-icx";
    intel_gnr: "intel-gnr";
    intel_skx: "intel-skx";
    amd: "amd";
    epf: "epf";
}
