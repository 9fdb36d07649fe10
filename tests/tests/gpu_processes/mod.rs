//! Whole groups on GPUs, a process for each rank: every byte on every rank, on streams, from the
//! caller's memory, in graphs. On GPUs where there are any, on the simulated driver otherwise.
//!
//! One set of processes lives through all cases of a chapter, because contexts take long to make. A
//! case that fails ends its chapter.

mod algorithms;
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
use crate::vendor::{self, Context, ENGINES, missing_engine};
use parent::Troupe;

pub(crate) fn main() -> ExitCode {
    if let Some(parent) = Parent::find() {
        return parent.exit_code(play(&parent));
    }
    let driver = GpuDriver::load::<Context>();
    eprintln!("running on: {driver:?}");
    let mut arguments = Arguments::from_args();
    // Ranks share the processors already.
    arguments.test_threads.get_or_insert(1);
    let chapters = (1..=4).flat_map(|ranks| Chapter::SMALL.map(|chapter| (ranks, chapter)));
    let large = (5..=9).flat_map(|ranks| [(ranks, Chapter::Shapes), (ranks, Chapter::BackToBack)]);
    let algorithms = (1..=9).map(|ranks| (ranks, Chapter::Algorithms));
    let on_all = chapters.chain(large).chain(algorithms);
    let on_all = on_all.map(|(ranks, chapter)| (ranks, chapter, Machine::Whole));
    let on_all: Vec<_> = on_all.collect();
    let trials = ENGINES.iter().flat_map(|engine| {
        let missing = missing_engine(engine);
        if let Some(why) = &missing {
            eprintln!("those over {engine} are ignored: {why}");
        }
        // Where there is one kind, its name tells nothing.
        let kind = if ENGINES.len() > 1 { format!("{engine}::") } else { String::new() };
        let others = machine::MACHINES.iter().chain(vendor::MACHINES);
        let on_others = others.flat_map(|machine| {
            Chapter::on_other_machines(engine).iter().map(|chapter| (3, *chapter, *machine))
        });
        let suited = on_all.iter().copied().filter(|(_, chapter, _)| chapter.suits(engine));
        let trial = move |(ranks, chapter, machine)| {
            let troupe = Troupe { driver, ranks, chapter, machine, engine };
            let driver = driver.name::<Context>();
            let name = format!("{driver}::{kind}{chapter}::{ranks}_ranks{machine}");
            Trial::test(name, move || troupe.run().map_err(Into::into))
                .with_ignored_flag(missing.is_some() || troupe.reason_to_skip().is_some())
        };
        suited.chain(on_others).map(trial).collect::<Vec<_>>()
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
    Algorithms,
    Shapes,
    BackToBack,
    Delayed,
    OwnMemory,
    Captured,
    Together,
}

impl Chapter {
    /// Those of every number of ranks up to four.
    const SMALL: [Self; 6] = [
        Self::Shapes,
        Self::BackToBack,
        Self::Delayed,
        Self::OwnMemory,
        Self::Captured,
        Self::Together,
    ];

    /// Whether these engines can play it: those that the host drives take no streams.
    fn suits(self, engine: &str) -> bool {
        engine == "streams" || matches!(self, Self::Algorithms | Self::Shapes | Self::OwnMemory)
    }

    /// What such engines play on machines that lack something.
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
        }
    }
}

impl fmt::Display for Chapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Algorithms => "algorithms",
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
        let mut all = Self::SMALL.into_iter().chain([Self::Algorithms]);
        all.find(|chapter| chapter.to_string() == text).ok_or(())
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
        parent.print_line(format_args!("passed {}", case.name));
    }
    stage.group.close().map_err(unexpected)?;
    parent.print_line("done");
    Ok(())
}
