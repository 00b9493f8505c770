//! `gpu-try`: what can be tried with one GPU, or with one at each of two hosts. One line a step on standard error, pass, fail or
//! waived with the reason; one JSON object on standard output.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "this is the program")]

mod bars;
mod steps;

use std::{process::ExitCode, sync::Arc};

use clap::{Parser, ValueEnum};
use ntb_gpudirect::{
    GpuError,
    across::{self, End, Trial},
    cuda::{Cuda, Driver},
    seam::Gpu,
};
use ntb_ring::address::Address;
use serde_json::json;

/// Which ends are GPUs.
#[derive(Clone, Copy, ValueEnum)]
enum Way {
    /// A processor sends, a GPU receives.
    HostToGpu,
    /// A GPU sends, a processor receives.
    GpuToHost,
    /// GPUs at both ends.
    GpuToGpu,
}

/// Tries GPU memory and device code: alone, or over a bridge with --serve at one host and --peer at the other.
///
/// Exit codes: 0 nothing failed, 1 something failed, 2 usage, 3 no GPU or no driver, 4 no peer, 5 lost, 6 permission or limits.
#[derive(Parser)]
#[command(name = "gpu-try", version)]
struct Cli {
    /// Number of the GPU
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Steps to run, by the beginning of their names [default: all]
    #[arg(long)]
    only: Option<String>,
    /// Receives over this link, such as ntb:0000:81:00.0
    #[arg(long, conflicts_with = "peer")]
    serve: Option<Address>,
    /// Sends over this link
    #[arg(long)]
    peer: Option<Address>,
    /// Which ends are GPUs, over a link; both sides give the same
    #[arg(long, value_enum, default_value = "host-to-gpu")]
    way: Way,
    /// Messages to send over a link
    #[arg(long, default_value_t = 10_000)]
    messages: u64,
    /// Bytes of each
    #[arg(long, default_value_t = 200)]
    size: u32,
}

fn open(index: u32) -> Result<Arc<dyn Gpu>, GpuError> {
    Ok(Arc::new(Cuda::open(&Driver::find()?, index)?))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let over = cli.serve.as_ref().or(cli.peer.as_ref());
    let exit = match over {
        None => alone(&cli),
        Some(address) => across(&cli, address),
    };
    ExitCode::from(exit)
}

fn told(e: &GpuError) -> u8 {
    eprintln!("gpu-try: {}: {e}", e.name);
    println!("{}", json!({"passed": false, "name": e.name, "why": e.what}));
    e.exit
}

fn alone(cli: &Cli) -> u8 {
    let only = cli.only.as_deref().unwrap_or("");
    let list = |results: &[steps::Outcome]| -> Vec<_> {
        let one = |r: &steps::Outcome| json!({"step": r.name, "state": r.state, "what": r.what});
        results.iter().map(one).collect()
    };
    let gpu = match open(cli.gpu) {
        Ok(gpu) => gpu,
        // No GPU, no driver: nothing has failed, and nothing was tried.
        Err(e) if e.exit == 3 => {
            let results = steps::waived(only, &e);
            println!(
                "{}",
                json!({"passed": false, "name": e.name, "why": e.what, "steps": list(&results)})
            );
            return e.exit;
        }
        Err(e) => return told(&e),
    };
    let results = steps::run(&gpu, only);
    let failed = results.iter().filter(|r| r.state == "fail").count();
    let list = list(&results);
    let facts = gpu.facts();
    println!(
        "{}",
        json!({"passed": failed == 0, "gpu": facts.name, "driver": facts.driver_version, "steps": list})
    );
    u8::from(failed > 0)
}

fn across(cli: &Cli, address: &Address) -> u8 {
    let (from, to) = match cli.way {
        Way::HostToGpu => (End::Host, End::Gpu),
        Way::GpuToHost => (End::Gpu, End::Host),
        Way::GpuToGpu => (End::Gpu, End::Gpu),
    };
    let serves = cli.serve.is_some();
    let end = if serves { to } else { from };
    let gpu = match end {
        End::Host => Ok(None),
        End::Gpu => open(cli.gpu).map(Some),
    };
    let result = gpu.and_then(|gpu| {
        if serves {
            across::receive(address, gpu.as_ref())
        } else {
            let trial = Trial {
                size: cli.size,
                messages: cli.messages,
                far: Some(to),
            };
            let sent = across::send(address, gpu.as_ref(), trial);
            sent.map(|o| {
                format!(
                    "{} messages of {} bytes in {:?}, all as sent; {}",
                    o.messages, cli.size, o.elapsed, o.way
                )
            })
        }
    });
    match result {
        Ok(what) => {
            eprintln!("pass   {what}");
            println!("{}", json!({"passed": true, "what": what}));
            0
        }
        Err(e) => told(&e),
    }
}
