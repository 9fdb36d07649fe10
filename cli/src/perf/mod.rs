//! `peerlane perf`: measures bare puts, gets and signals between two ranks.

use peerlane::bootstrap::Bootstrap;
use peerlane::bootstrap::environment::Environment;
use peerlane::bootstrap::tcp::Tcp;
use peerlane::hal::Fabric;
use peerlane::{Deadline, host};

use crate::cards::Holder;
use crate::error::{Failure, Result};
use crate::ranks::circle::Circle;
use crate::ranks::placement::{self, Bind};
use crate::ranks::{self, Origin, write_to_parent};

mod latency;
mod options;
mod pair;
mod rate;
mod row;
mod screen;

pub(crate) use options::Options;
use options::{Backend, Work};
use pair::Pair;
use row::Row;
use screen::Screen;

/// Who measures, and who answers.
const RANKS: usize = 2;

/// Takes the rows of rank 0.
type Sink<'a> = &'a mut dyn FnMut(Row) -> Result<()>;

/// Joins the pair of a launcher, or spawns one.
///
/// # Errors
/// Whatever ends the run.
pub(crate) fn run(options: &Options) -> Result<()> {
    match Origin::of(options.spawned_by)? {
        Origin::Person => {
            options.check()?;
            let mut screen = Screen::open(options)?;
            let result = ranks::spawn(RANKS, options.timeout, &mut screen);
            let shown = screen.finish();
            result.and(shown)
        }
        Origin::Program(environment) => {
            let rank = environment.rank.index();
            if options.bind == Bind::Core {
                placement::bind(rank, RANKS)?;
            }
            measure(options, &environment, true, &mut |row| write_to_parent(&row))
        }
        Origin::Launcher(environment) => join(options, &environment),
    }
}

/// As a rank that somebody else has started; rank 0 prints.
fn join(options: &Options, environment: &Environment) -> Result<()> {
    if environment.ranks != RANKS {
        let seen = environment.ranks;
        let text = format!("the launcher has started {seen} ranks, perf wants {RANKS}");
        return Err(Failure::usage(text).with_advice("start two, one on each machine say"));
    }
    options.check()?;
    if environment.rank.0 != 0 {
        return measure(options, environment, false, &mut |_| Ok(()));
    }
    let mut screen = Screen::open(options)?;
    let result = measure(options, environment, false, &mut |row| screen.show(row));
    let shown = screen.finish();
    result.and(shown)
}

fn measure(
    options: &Options,
    environment: &Environment,
    alone: bool,
    sink: Sink<'_>,
) -> Result<()> {
    let bootstrap = Tcp::join(environment, Deadline::after(options.timeout))?;
    let circle = Circle::new(bootstrap, options.timeout);
    let seed = options.settings().agree(&circle)?;
    let (rank, ranks) = (circle.rank(), circle.ranks());
    // Nobody waits for a rank that is only put to and got from.
    let is_waited_for = rank.0 == 0 || options.signal;
    let spin = options.spin.filter(|_| is_waited_for).map(|spin| spin.0);
    match options.backend {
        Backend::Host => {
            let hosts = circle.share("host", &circle.host().to_owned())?;
            if hosts[0] != hosts[1] {
                let text = "the two ranks are on two hosts, which have no memory in common";
                return Err(Failure::failed(text).with_advice("take --backend rdma"));
            }
            let how = host::Options { spin, ..host::Options::default() };
            let fabric = host::Fabric::open_with(rank, ranks, how).map_err(Failure::of_backend)?;
            with_fabric(options, circle, fabric, seed, sink)
        }
        Backend::Rdma => {
            let local_rank = environment.local_rank.unwrap_or(0) as usize;
            let holder = Holder { rank, ranks, local_rank, alone };
            let fabric = options.cards.open(holder, spin)?;
            with_fabric(options, circle, fabric, seed, sink)
        }
    }
}

fn with_fabric<F: Fabric>(
    options: &Options,
    circle: Circle,
    fabric: F,
    seed: u64,
    sink: Sink<'_>,
) -> Result<()> {
    let mut pair = Pair::open(options, circle, fabric, seed)?;
    for (work, sizes) in options.plan() {
        for bytes in sizes {
            let row = match work {
                Work::Put | Work::Get => rate::measure(&mut pair, work, bytes)?,
                Work::Signal => latency::measure(&mut pair, bytes)?,
            };
            if let Some(row) = row {
                sink(row)?;
            }
        }
    }
    pair.close()
}
