//! The test vectors of `docs/wire.md`, recomputed: page and code cannot drift apart.

use ntb_mem::line::Line;

use super::{
    beat::{AGREED, Beat, HELLO_TAKEN},
    check::Check,
    hash,
    hello::Hello,
    identity::{Direction, Identity},
    layout::{ITEM_VALUES, fingerprint},
    line::{self, Order},
    mark::{Kind, LaneKey},
    pattern::Pattern,
    registers::{Ended, Phase, Report},
    table::{Entry, Name, digest},
};

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/wire.md"));

const WRITER: Identity = Identity {
    incarnation: 0x1111_2222_3333_4444,
    life: 5,
};
const READER: Identity = Identity {
    incarnation: 0xaaaa_bbbb_cccc_dddd,
    life: 9,
};
const DIRECTION: Direction = Direction {
    writer: WRITER,
    reader: READER,
};
const KEY: LaneKey = LaneKey::new(0x1234, 0xffff_fffe, 0xdead_beef);

fn lines(lines: &[Line]) -> Vec<u8> {
    lines.iter().flat_map(|line| line.to_bytes()).collect()
}

fn entry() -> Entry {
    Entry {
        name: Name::new("quotes").unwrap(),
        open: true,
        generation: 3,
        echo: 2,
        key: Some(KEY),
        first_page: 4,
        ring_lines: 1024,
        check: true,
        smaller_if_different: false,
        doorbell: 5,
        exported: false,
    }
}

fn small(order: Order, seq: u64) -> Vec<u8> {
    lines(&[line::encode_single(KEY, order, Kind::Small, seq, 7, b"hello")])
}

fn head(order: Order, kind: Kind, shape: (u32, u32), bytes: &[u8]) -> Vec<u8> {
    let extra = line::extra_lines(kind, bytes.len() as u64) > 0;
    let (inline, tail) = if extra { (&[][..], bytes) } else { (bytes, &[][..]) };
    let mut check = Check::default();
    if order == Order::Relaxed {
        check = check.bytes(8, tail);
    }
    let mut out = lines(&[line::encode_head(KEY, order, kind, 1, 7, shape, inline, check)]);
    out.extend_from_slice(tail);
    out.resize(out.len().next_multiple_of(64), 0);
    out
}

/// Every vector of the page, by name.
fn vectors() -> Vec<(&'static str, Vec<u8>)> {
    let report = Report {
        versions: (1, 1),
        who: WRITER,
        phase: Phase::Ready,
        ended: Ended::LinkLost,
        echo: READER.echo(),
        pages: 512,
        pattern: 3,
        found: 2,
    };
    let registers = report.encode().iter().flat_map(|r| r.to_le_bytes()).collect();
    let beat = Beat {
        count: 17,
        flags: HELLO_TAKEN | AGREED,
        found: 2,
        table: 0x0102_0304,
    };
    let hello = Hello {
        versions: (1, 1),
        order: Order::Ordered,
        pid: 4711,
        required: 0,
        understood: 0,
        fingerprint: fingerprint(&ITEM_VALUES),
        window_lines: 32768,
        reach_lines: 65536,
        items: ITEM_VALUES,
        node: "left".to_owned(),
        package: "0.1.0".to_owned(),
    };
    let id = DIRECTION.id();
    let pattern = Pattern::new(id, 3);
    let places = pattern.places(32768).flat_map(u64::to_le_bytes).collect();
    let record = entry().encode(id, 1);
    let mut table = [0; 64];
    table[1] = record.0[7];
    let bytes: Vec<u8> = (0..100).collect();
    vec![
        (
            "check",
            Check::default()
                .bytes(0, b"abcdefgh01234567xyz")
                .finish()
                .to_le_bytes()
                .to_vec(),
        ),
        ("hash", hash::hash(1, &[2, 3]).to_le_bytes().to_vec()),
        ("echo", READER.echo().to_le_bytes().to_vec()),
        ("direction", id.to_le_bytes().to_vec()),
        ("registers", registers),
        ("fingerprint", fingerprint(&ITEM_VALUES).to_le_bytes().to_vec()),
        ("pattern-places", places),
        ("pattern-line", lines(&[pattern.line(256)])),
        ("beat", lines(&[beat.encode(DIRECTION)])),
        ("hello", lines(&hello.encode(id))),
        ("channel", lines(&[record])),
        ("table-digest", digest(&table).to_le_bytes().to_vec()),
        ("small-ordered", small(Order::Ordered, 1)),
        ("small-relaxed", small(Order::Relaxed, 1)),
        ("small-wrapped", small(Order::Ordered, 2)),
        (
            "bare",
            lines(&[line::encode_single(
                KEY,
                Order::Ordered,
                Kind::Bare,
                1,
                0,
                &bytes[..50],
            )]),
        ),
        (
            "long-inline",
            head(Order::Ordered, Kind::Long, (40, 1), &bytes[..40]),
        ),
        ("long-ordered", head(Order::Ordered, Kind::Long, (100, 1), &bytes)),
        ("long-relaxed", head(Order::Relaxed, Kind::Long, (100, 1), &bytes)),
        ("packed", head(Order::Ordered, Kind::Packed, (8, 4), &bytes[..32])),
        ("control-word", KEY.seal(300).to_le_bytes().to_vec()),
    ]
}

/// The bytes of the fenced block with the info string `hex NAME`.
fn on_page(name: &str) -> Option<Vec<u8>> {
    let start = format!("```hex {name}\n");
    let block = PAGE.split_once(&start)?.1.split_once("```")?.0;
    block
        .split_whitespace()
        .map(|byte| u8::from_str_radix(byte, 16).ok())
        .collect()
}

fn block(name: &str, bytes: &[u8]) -> String {
    let mut text = format!("```hex {name}\n");
    for row in bytes.chunks(16) {
        let row: Vec<String> = row.iter().map(|b| format!("{b:02x}")).collect();
        text += &row.join(" ");
        text += "\n";
    }
    text + "```\n"
}

#[test]
fn the_page_shows_what_the_code_does() {
    let vectors = vectors();
    let wrong: String = vectors
        .iter()
        .filter(|(name, bytes)| on_page(name).as_ref() != Some(bytes))
        .map(|(name, bytes)| block(name, bytes))
        .collect();
    assert!(wrong.is_empty(), "docs/wire.md must say:\n{wrong}");
    assert_eq!(
        PAGE.matches("```hex ").count(),
        vectors.len(),
        "a block that nothing checks"
    );
}
