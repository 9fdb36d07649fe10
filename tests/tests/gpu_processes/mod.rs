//! Whole groups on GPUs, a process for each rank: every byte on every rank, on streams, from the
//! caller's memory, in graphs. On GPUs where there are any, on the simulated driver otherwise.
//!
//! One set of processes lives through all cases of a chapter, because contexts take long to make. A
//! case that fails ends its chapter.

mod captured;
mod own_memory;
mod parent;
mod shapes;
mod streams;
mod together;

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;

use libtest_mimic::{Arguments, Trial};
use peerlane_conformance::processes::Parent;
use peerlane_conformance::{GpuDriver, Outcome};

use crate::support::data::unexpected;
use crate::support::machine::{self, Machine};
use crate::support::stage::Stage;
use crate::vendor::{self, Context};
use parent::Troupe;

pub(crate) fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.ended(play(&parent));
    }
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already.
    arguments.test_threads.get_or_insert(1);
    let chapters = (1..=4).flat_map(|ranks| Chapter::ALL.map(|chapter| (ranks, chapter)));
    let large = (5..=9).flat_map(|ranks| [(ranks, Chapter::Shapes), (ranks, Chapter::BackToBack)]);
    let on_all = chapters.chain(large).map(|(ranks, chapter)| (ranks, chapter, Machine::Whole));
    let others = machine::MACHINES.iter().chain(vendor::MACHINES).copied();
    let on_others = others.flat_map(|machine| {
        [Chapter::BackToBack, Chapter::Captured].map(|chapter| (3, chapter, machine))
    });
    let trials = on_all.chain(on_others).map(|(ranks, chapter, machine)| {
        let troupe = Troupe { driver, ranks, chapter, machine };
        let name = format!("{}::{chapter}::{ranks}_ranks{machine}", driver.name::<Context>());
        Trial::test(name, move || troupe.run().map_err(Into::into))
            .with_ignored_flag(troupe.reason_to_skip().is_some())
    });
    let trials = trials.collect();
    if driver == GpuDriver::Device {
        eprintln!("some are ignored: {}; {}", parent::TOO_MANY, parent::OTHER);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Cases that one set of processes lives through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chapter {
    Shapes,
    BackToBack,
    Delayed,
    OwnMemory,
    Captured,
    Together,
}

impl Chapter {
    const ALL: [Self; 6] = [
        Self::Shapes,
        Self::BackToBack,
        Self::Delayed,
        Self::OwnMemory,
        Self::Captured,
        Self::Together,
    ];

    /// The cases of a group of so many ranks, in order; the same on all ranks.
    fn cases(self, ranks: usize) -> Vec<Case> {
        match self {
            Self::Shapes => shapes::cases(ranks),
            Self::BackToBack => streams::back_to_back(ranks),
            Self::Delayed => streams::delayed(ranks),
            Self::OwnMemory => own_memory::cases(),
            Self::Captured => captured::cases(),
            Self::Together => together::cases(),
        }
    }
}

impl fmt::Display for Chapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shapes => "shapes",
            Self::BackToBack => "back_to_back",
            Self::Delayed => "one_rank_delayed",
            Self::OwnMemory => "own_memory",
            Self::Captured => "captured",
            Self::Together => "together",
        })
    }
}

impl FromStr for Chapter {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|chapter| chapter.to_string() == text).ok_or(())
    }
}

/// One thing that every rank does.
struct Case {
    name: String,
    play: Box<dyn Fn(&mut Stage) -> Outcome>,
}

impl Case {
    fn new(name: impl fmt::Display, play: impl Fn(&mut Stage) -> Outcome + 'static) -> Self {
        Self { name: name.to_string(), play: Box::new(play) }
    }
}

/// One rank of a chapter.
fn play(parent: &Parent) -> Outcome {
    let chapter: Chapter = parent.value("CHAPTER")?;
    let mut stage = Stage::open(parent)?;
    for case in chapter.cases(stage.ranks) {
        (case.play)(&mut stage).map_err(|failure| failure.within(&case.name))?;
        parent.say(format_args!("passed {}", case.name));
    }
    stage.group.close().map_err(unexpected)?;
    parent.say("done");
    Ok(())
}
