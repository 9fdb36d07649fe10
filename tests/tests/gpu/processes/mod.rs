//! Runs whole groups on GPUs, one process for each rank, and checks every byte: on streams, from
//! the caller's memory, in graphs.
//!
//! It runs on GPUs if there are any, otherwise on the simulated driver. One set of processes runs
//! all cases of a scenario, because creating contexts takes long. A case that fails ends its
//! scenario. Some scenarios run with ranks that are threads of one process too.

mod algorithms;
mod captured;
mod channels;
mod counts;
mod fused;
mod heap;
mod own_memory;
mod parent;
mod reductions;
mod resized;
mod shapes;
mod streams;
mod together;
mod windows;

use std::fmt;
use std::str::FromStr;
use std::thread;

use libtest_mimic::Trial;
use peerlane_tests::processes::Parent;
use peerlane_tests::{GpuDriver, Outcome};

use crate::support::data::unexpected;
use crate::support::machine::{self, Machine};
use crate::support::test_rank::TestRank;
use crate::vendor::{self, Context, ENGINES, missing_engine};
use parent::Processes;

/// The role of a process that is one rank of a scenario.
pub(crate) const ROLE: &str = "rank";

/// Lists the scenarios.
pub(crate) fn trials(driver: GpuDriver) -> Vec<Trial> {
    let trials = ENGINES.iter().flat_map(|engine| {
        let missing = missing_engine(engine);
        if let Some(why) = &missing {
            eprintln!("those over {engine} are ignored: {why}");
        }
        // Where there is one kind, its name tells nothing.
        let kind = if ENGINES.len() > 1 { format!("{engine}::") } else { String::new() };
        let shows_all = vendor::shows_all(driver, engine);
        let once = if shows_all { machine::OF_ONE_VENDOR } else { &[] };
        let others = machine::OF_EACH_VENDOR.iter().chain(once).chain(vendor::MACHINES);
        let on_others = others.flat_map(|machine| {
            Scenario::on_other_machines(engine).iter().map(|scenario| (3, *scenario, *machine))
        });
        let suited = Scenario::ALL.into_iter().filter(|scenario| scenario.suits(engine));
        let suited = suited.flat_map(|scenario| {
            let ranks = scenario.ranks(engine, shows_all).iter();
            ranks.map(move |ranks| (*ranks, scenario, Machine::Whole))
        });
        let of_processes = suited.chain(on_others).map(|of_ranks| (of_ranks, false));
        let as_threads = Scenario::AS_THREADS.into_iter().filter(|scenario| scenario.suits(engine));
        // Few devices are enough for two, and the simulated driver has one for each of three.
        let threads = if driver == GpuDriver::Device { 2 } else { 3 };
        let of_threads =
            as_threads.map(move |scenario| ((threads, scenario, Machine::Whole), true));
        let trial = move |((ranks, scenario, machine), are_threads)| {
            let processes = Processes { driver, ranks, scenario, machine, engine, are_threads };
            let driver = driver.name::<Context>();
            let what = if are_threads { "threads" } else { "ranks" };
            let name = format!("{driver}::{kind}{scenario}::{ranks}_{what}{machine}");
            Trial::test(name, move || processes.run().map_err(Into::into))
                .with_ignored_flag(missing.is_some() || processes.reason_to_skip().is_some())
        };
        of_processes.chain(of_threads).map(trial).collect::<Vec<_>>()
    });
    if driver == GpuDriver::Device {
        eprintln!("some are ignored: {}; {}; {}", parent::TOO_MANY, parent::OTHER, parent::SHARED);
    }
    trials.collect()
}

/// Cases that one set of processes lives through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scenario {
    Algorithms,
    Shapes,
    BackToBack,
    Delayed,
    OwnMemory,
    Captured,
    Together,
    Windows,
    Resized,
    Heap,
    Channels,
    Reductions,
    Fused,
}

impl Scenario {
    const ALL: [Self; 13] = [
        Self::Algorithms,
        Self::Shapes,
        Self::BackToBack,
        Self::Delayed,
        Self::OwnMemory,
        Self::Captured,
        Self::Together,
        Self::Windows,
        Self::Resized,
        Self::Heap,
        Self::Channels,
        Self::Reductions,
        Self::Fused,
    ];

    /// Those that run with ranks that are threads of one process too. A capture can forbid calls of
    /// all threads, so those with graphs are left out.
    const AS_THREADS: [Self; 4] =
        [Self::Algorithms, Self::BackToBack, Self::Channels, Self::Reductions];

    /// Returns the numbers of ranks with which these engines run it.
    fn ranks(self, engine: &str, shows_all: bool) -> &'static [usize] {
        const ALL: &[usize] = &[1, 2, 3, 4, 5, 6, 7, 8, 9];
        match self {
            // The calls of each vendor see no peer, one, a few, and the largest group.
            Self::BackToBack if !shows_all => &[1, 2, 3, 4, 9],
            Self::Fused if !shows_all => &[],
            _ if !shows_all => &[3],
            Self::Algorithms => ALL,
            Self::Shapes | Self::BackToBack if engine == "streams" => ALL,
            Self::Heap => &ALL[..8],
            // A launch reaches at most 8 ranks.
            Self::Fused => &[2, 3, 8],
            _ => &ALL[..4],
        }
    }

    /// Returns whether these engines can run it: engines that the host drives take no streams.
    fn suits(self, engine: &str) -> bool {
        engine == "streams" || matches!(self, Self::Algorithms | Self::Shapes | Self::OwnMemory)
    }

    /// Returns the scenarios for machines that lack a feature.
    fn on_other_machines(engine: &str) -> &'static [Self] {
        if engine == "streams" { &[Self::BackToBack, Self::Captured] } else { &[Self::Algorithms] }
    }

    /// The cases of a group of so many ranks, in order; the same on all ranks.
    fn cases(self, ranks: usize) -> Vec<Case> {
        match self {
            Self::Algorithms => algorithms::cases(ranks),
            Self::Shapes => shapes::cases(ranks),
            Self::BackToBack => streams::back_to_back(ranks),
            Self::Delayed => streams::delayed(ranks),
            Self::OwnMemory => own_memory::cases(),
            Self::Captured => captured::cases(),
            Self::Together => together::cases(),
            Self::Windows => windows::cases(),
            Self::Resized => resized::cases().into_iter().chain(counts::cases()).collect(),
            Self::Heap => heap::cases(ranks),
            Self::Channels => channels::cases(),
            Self::Reductions => reductions::cases(),
            Self::Fused => fused::cases(ranks),
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Algorithms => "algorithms",
            Self::Shapes => "shapes",
            Self::BackToBack => "back_to_back",
            Self::Delayed => "one_rank_delayed",
            Self::OwnMemory => "own_memory",
            Self::Captured => "captured",
            Self::Together => "together",
            Self::Windows => "windows",
            Self::Resized => "resized",
            Self::Heap => "heap",
            Self::Channels => "channels",
            Self::Reductions => "reductions",
            Self::Fused => "fused",
        })
    }
}

impl FromStr for Scenario {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|scenario| scenario.to_string() == text).ok_or(())
    }
}

/// One thing that every rank does.
struct Case {
    name: String,
    run: Box<dyn Fn(&mut TestRank) -> Outcome>,
}

impl Case {
    fn new(name: impl fmt::Display, run: impl Fn(&mut TestRank) -> Outcome + 'static) -> Self {
        Self { name: name.to_string(), run: Box::new(run) }
    }
}

/// One rank of a scenario, or all of them as threads.
pub(crate) fn run_rank(parent: &Parent) -> Outcome {
    let scenario: Scenario = parent.value("SCENARIO")?;
    if parent.value("ARE_THREADS")? {
        thread::scope(|scope| {
            let run = |rank| {
                scope.spawn(move || run_cases(parent, scenario, TestRank::open_as(parent, rank)?))
            };
            let threads: Vec<_> = (0..parent.value("RANKS")?).map(run).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("a rank panicked"))
        })?;
    } else {
        run_cases(parent, scenario, TestRank::open(parent)?)?;
    }
    parent.print_line("done");
    Ok(())
}

fn run_cases(parent: &Parent, scenario: Scenario, mut test_rank: TestRank) -> Outcome {
    for case in scenario.cases(test_rank.ranks) {
        (case.run)(&mut test_rank).map_err(|failure| failure.within(&case.name))?;
        parent.print_line(format_args!("passed {}", case.name));
    }
    test_rank.group.close().map_err(unexpected)
}
