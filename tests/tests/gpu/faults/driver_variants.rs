//! Runs on drivers that lack a feature or differ in one. The all-gathers must be correct, or an
//! error must name the obstacle.

use peerlane_tests::processes::Child;
use peerlane_tests::{GpuDriver, Outcome};

use super::Fault;
use super::processes::{Player, finish, ranks, says, words};

use crate::driver::{self, REFUSED, VISIBLE, WITHOUT, folder_without};

const RANKS: usize = 3;

/// Settings of the simulated driver, whichever the vendor, under which gathers go other ways.
const SETTINGS: &[(&str, &str)] = &[
    ("PEER_WRITES", "refuse"),
    ("PEER_WRITES", "drop"),
    ("VMM", "off"),
    ("POSIX_FD", "off"),
    ("COPY_ENGINES", "1"),
    ("COPY_ENGINES", "2"),
    ("QUEUE_LENGTH", "900"),
    ("JITTER_US", "500"),
];

/// What captures do with memory operations, and why they are refused then.
const NO_CAPTURES: &[(&str, &str)] = &[
    ("refuse", REFUSED),
    ("drop", "captured graphs cannot be used"),
    ("now", "captured graphs cannot be used"),
];

pub(crate) fn faults() -> Vec<Fault> {
    let mut faults = vec![
        // Two ranks of two processes.
        Fault::new("one_device_for_two_ranks", |driver| {
            gathers(driver, 2, |player| player.variable(VISIBLE, "0"))
        }),
        Fault::simulated("device_hidden_by_each_rank", |driver| {
            let (_hub, children) = ranks(driver, "gather", RANKS, |rank, player| {
                player.variable(VISIBLE, rank.to_string())
            })?;
            all_gathered(children)
        }),
    ];
    for &(name, symbols) in WITHOUT {
        faults.push(Fault::simulated(format!("without::{name}"), move |driver| {
            let folder = folder_without(symbols);
            gathers(driver, RANKS, |player| player.driver_from(&folder))
        }));
    }
    for &(setting, value) in SETTINGS.iter().chain(driver::SETTINGS) {
        faults.push(Fault::simulated(format!("with::{setting}_{value}"), move |driver| {
            let name = format!("PEERLANE_SIM_{setting}");
            gathers(driver, RANKS, |player| player.variable(&name, value))
        }));
    }
    for &(value, says) in NO_CAPTURES {
        faults.push(Fault::simulated(format!("captures_that_{value}"), move |driver| {
            no_captures(driver, value, says)
        }));
    }
    faults.push(Fault::simulated("copies_to_peers_that_do_nothing", |driver| {
        let change = |_, player: Player| player.variable("PEERLANE_SIM_DROP_COPIES", "peer");
        let (_hub, mut children) = ranks(driver, "gather", 2, change)?;
        for (rank, text) in words(&mut children)?.iter().enumerate() {
            let begins = "fell in prepare: unavailable, rank none: cannot create an engine: ";
            let holds = [&format!("device {rank} ("), "did not arrive", "peer access"];
            says(&format!("rank {rank}"), text, begins, &holds)?;
        }
        Ok(())
    }));
    faults
}

/// Where captures cannot be trusted they are refused before anything is recorded, and starts that run
/// at once go on.
fn no_captures(driver: GpuDriver, value: &str, reason: &str) -> Outcome {
    let (_hub, mut children) = ranks(driver, "capture", 2, |_, player| {
        player.variable("PEERLANE_SIM_CAPTURED_WORDS", value)
    })?;
    for (rank, text) in words(&mut children)?.iter().enumerate() {
        let holds = [&format!("device {rank} ("), reason];
        says(&format!("rank {rank}"), text, "unavailable: ", &holds)?;
    }
    for text in words(&mut children)? {
        says("a rank", &text, "the capture is whole, gathered", &[])?;
    }
    finish(children)
}

/// All ranks gather what they should.
fn gathers(driver: GpuDriver, count: usize, change: impl Fn(Player) -> Player) -> Outcome {
    let (_hub, children) = ranks(driver, "gather", count, |_, player| change(player))?;
    all_gathered(children)
}

fn all_gathered(mut children: Vec<Child>) -> Outcome {
    for wanted in ["gathered: ", "closed well"] {
        for (rank, text) in words(&mut children)?.iter().enumerate() {
            says(&format!("rank {rank}"), text, wanted, &[])?;
        }
    }
    finish(children)
}
