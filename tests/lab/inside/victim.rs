//! Memory that a peer is let into, and memory around it that it must not reach.

use std::sync::{Arc, atomic::Ordering};

use ntb::window::InboundWindow;
use ntb_mem::region::{Pages, Region, View};
use serde_json::{Map, Value};

use super::{Result, port::Port, said, stop_at};

/// Memory of this process, of the guards' pattern, beside what is exposed.
const ELSEWHERE: u64 = 64 << 20;
const GUARD: u64 = 0x5AFE_5AFE_0BAD_F00D;

#[derive(clap::Args)]
pub(super) struct Args {
    /// The port.
    address: String,
}

fn guard(view: &View) {
    for word in 0..view.words() {
        view.store(word, GUARD, Ordering::Relaxed);
    }
}

fn changed(view: &View) -> u64 {
    let words = (0..view.words()).filter(|word| view.load(*word, Ordering::Acquire) != GUARD);
    words.count() as u64
}

fn memory(bytes: u64) -> Result<Arc<Region>> {
    let region = Region::allocate(bytes, Pages::Normal).map_err(|e| said("memory")(&e))?;
    let region = Arc::new(region);
    guard(&region.view());
    Ok(region)
}

pub(super) fn run(args: &Args, facts: &mut Map<String, Value>) -> Result<()> {
    let open = Port::open(&args.address)?;
    let port = &open.port;
    let info = *port.windows().first().ok_or("the port has no window")?;
    // Where translations are finer than the BAR, half of it is exposed, between guards in the same mapping; the
    // peer's aperture reaches beyond it. Elsewhere the whole BAR is.
    let coarse = info.address_align >= info.bytes;
    let bytes = if coarse { info.bytes } else { info.bytes / 2 };
    let margin = info.address_align.max(64 << 10);
    let region = memory(margin + bytes + margin.max(info.bytes))?;
    let elsewhere = memory(ELSEWHERE)?;
    let mapping = open.space.map(&region, info.address_align);
    let mapping = Arc::new(mapping.map_err(|e| said("mapping")(&e))?);
    // The coarse families compare limits when the window opens: after the link is up, as links do.
    open.link_up()?;
    let window = InboundWindow::part(port, 0, &region, &mapping, margin, bytes);
    let window = window.map_err(|e| said("opening the window")(&e))?;
    let guards = |facts: &mut Map<String, Value>, when: &str| -> Result<()> {
        let all = region.view();
        let lines = all.lines();
        let before = all.part(0, margin / 64).map_or(0, |view| changed(&view));
        let first_after = (margin + bytes) / 64;
        let after = all.part(first_after, lines - first_after);
        let after = after.map_or(0, |view| changed(&view));
        let elsewhere = changed(&elsewhere.view());
        let inside = changed(&window.view());
        facts.insert(
            when.to_owned(),
            serde_json::json!({
                "inside": inside, "before": before, "after": after, "elsewhere": elsewhere,
            }),
        );
        if before + after + elsewhere > 0 {
            return Err(format!(
                "{when}: memory outside the window has changed: {before} words before it, {after} after it, {elsewhere} elsewhere"
            ));
        }
        Ok(())
    };
    facts.insert("window_bytes".to_owned(), bytes.into());
    facts.insert("aperture_bytes".to_owned(), info.bytes.into());

    stop_at("window open")?;
    guards(facts, "window")?;
    // What is inside has been written, all of it: the stores did arrive.
    let lines = window.view().lines();
    let inside = changed(&window.view());
    if inside < lines {
        return Err(format!(
            "only {inside} of {lines} lines of the window were written"
        ));
    }

    // A translation onto addresses that were never given out, as a faulty driver would set it: nothing but the IOMMU
    // is between the peer and this machine's memory now.
    guard(&window.view());
    let unmapped = mapping.iova() ^ (1 << 33);
    window.close().map_err(|e| said("closing the window")(&e))?;
    let wrong = port.open_window(0, unmapped, info.bytes);
    wrong.map_err(|e| said("opening a window onto nothing")(&e))?;
    facts.insert("unmapped".to_owned(), format!("{unmapped:#x}").into());
    stop_at("window wrong")?;
    let all = || changed(&region.view()) + changed(&elsewhere.view());
    let behind = all();
    facts.insert("behind_the_iommu".to_owned(), behind.into());
    if behind > 0 {
        return Err(format!(
            "{behind} words have changed behind a window onto nothing"
        ));
    }
    port.close_window(0)
        .map_err(|e| said("closing the window onto nothing")(&e))?;
    // The peer scribbles over its registers now.
    stop_at("closed")?;
    match all() {
        0 => Ok(()),
        changed => Err(format!("{changed} words have changed with all windows closed")),
    }
}
