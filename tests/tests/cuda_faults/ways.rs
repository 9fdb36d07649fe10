//! Drivers that lack something, or do something in their own way: gathers are right all the same, or
//! an error says what stands against it.

use peerlane_conformance::{CudaDriver, Outcome};

use crate::Fault;
use crate::cast::{Player, finish, ranks, says, words};

const RANKS: usize = 3;

pub(crate) fn faults() -> Vec<Fault> {
    let mut faults = vec![
        // Two ranks of two processes.
        Fault::new("one_device_for_two_ranks", |driver| {
            gathers(driver, 2, |player| player.variable("CUDA_VISIBLE_DEVICES", "0"))
        }),
        Fault::simulated("no_peer_access", no_peer_access),
        Fault::simulated("device_hidden_by_each_rank", |driver| {
            let (_hub, children) = ranks(driver, "gather", RANKS, |rank, player| {
                player.variable("CUDA_VISIBLE_DEVICES", rank.to_string())
            })?;
            all_gathered(children)
        }),
    ];
    for (name, symbols) in [
        ("memory_with_descriptors", &["cuMemCreate"][..]),
        ("batched_words", &["cuStreamBatchMemOp_v2"]),
        ("handles_of_segments", &["cuMemRetainAllocationHandle"]),
    ] {
        faults.push(Fault::simulated(format!("without::{name}"), move |driver| {
            let folder = peerlane_simulated_driver::without_symbols(symbols);
            gathers(driver, RANKS, |player| player.driver_from(&folder))
        }));
    }
    for (setting, value) in [
        ("PEER_WRITES", "refuse"),
        ("PEER_WRITES", "drop"),
        ("VMM", "off"),
        ("POSIX_FD", "off"),
        ("COPY_ENGINES", "1"),
        ("COPY_ENGINES", "2"),
        ("QUEUE_LENGTH", "900"),
        ("JITTER_US", "500"),
    ] {
        faults.push(Fault::simulated(format!("with::{setting}_{value}"), move |driver| {
            let name = format!("PEERLANE_SIM_{setting}");
            gathers(driver, RANKS, |player| player.variable(&name, value))
        }));
    }
    faults
}

/// All ranks gather what they should.
fn gathers(driver: CudaDriver, count: usize, change: impl Fn(Player) -> Player) -> Outcome {
    let (_hub, children) = ranks(driver, "gather", count, |_, player| change(player))?;
    all_gathered(children)
}

fn all_gathered(mut children: Vec<peerlane_conformance::processes::Child>) -> Outcome {
    for wanted in ["gathered", "closed well"] {
        for (rank, text) in words(&mut children)?.iter().enumerate() {
            says(&format!("rank {rank}"), text, wanted, &[])?;
        }
    }
    finish(children)
}

/// Nobody can gather, and everybody says which two devices stand against it.
fn no_peer_access(driver: CudaDriver) -> Outcome {
    let (_hub, mut children) =
        ranks(driver, "gather", 2, |_, player| player.variable("PEERLANE_SIM_P2P", "off"))?;
    for (rank, text) in words(&mut children)?.iter().enumerate() {
        // By their UUIDs, because each process counts its devices by itself.
        let (own, other) = (format!("rank {rank} on GPU-"), format!("rank {} on GPU-", 1 - rank));
        let holds = [own.as_str(), &other, "peer access", "(unavailable)"];
        says(&format!("rank {rank}"), text, "closed: ", &holds)?;
    }
    finish(children)
}
