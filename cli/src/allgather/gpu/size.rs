//! One size: everything that is compared is opened, checked, and timed in turn.

use std::rc::Rc;
use std::time::Duration;

use peerlane::Group;
use peerlane::bootstrap::Bootstrap;
use peerlane::collective::Collective;
use peerlane::group::Report;
use peerlane::hal::Fabric;

use super::beside::{Compute, beside};
use super::bounded::bounded;
use super::entrant::Entrant;
use super::limit::Ground;
use super::ours;
use super::rivals::Rivals;
use super::track::{Counts, Track};
use crate::allgather::dtype::of_dtype;
use crate::allgather::event::{Activity, Event, Sink};
use crate::allgather::figures::{self, Figures};
use crate::allgather::options::Options;
use crate::allgather::setup::{Setup, Way};
use crate::allgather::timeline;
use crate::error::Result;
use crate::ranks::circle::Circle;
use crate::ranks::data::Data;
use crate::ranks::statistics::Statistics;
use crate::report::{OnDevice, Rival, Row, bandwidths, microseconds};

/// Laps of each; the median counts.
const REPETITIONS: usize = 5;
/// From here on a start takes long enough that a few in a row are enough.
const LARGE_BYTES: u64 = 256 << 20;
const STARTS: u32 = 50;
const STARTS_LARGE: u32 = 10;

/// Everything that a rank measures with.
pub(super) struct Bench<'a, F: Fabric> {
    pub(super) setup: Setup<'a>,
    pub(super) seed: u64,
    pub(super) circle: Circle,
    pub(super) sink: Sink<'a>,
    pub(super) track: Track,
    /// Of each size, if they were measured.
    pub(super) limits: Vec<Duration>,
    pub(super) rivals: Option<Rivals>,
    pub(super) compute: Option<Compute>,
    pub(super) group: Group<F>,
}

/// What all ranks together have seen of it: of each lap the longest.
#[derive(Clone, Copy, Debug)]
struct Times {
    device: Statistics,
    host: Duration,
}

impl<F: Fabric> Bench<'_, F> {
    /// Tells the one who prints, if this rank is the one that tells.
    pub(super) fn tell(&mut self, event: Event) -> Result<()> {
        if self.circle.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    /// Measures and checks shards of so many elements; `index` counts the sizes. Collective.
    ///
    /// # Errors
    /// If an operation fails, or a byte is wrong on any rank.
    pub(super) fn size(&mut self, index: usize, shard_length: u64) -> Result<()> {
        let (rank, ranks) = (self.circle.rank(), self.circle.ranks());
        let own = self.setup.own_bytes(shard_length, rank);
        let total_bytes = self.total_bytes(shard_length);
        let counts = counts(self.setup.options, total_bytes);
        let limit = self.limits.get(index).copied();
        let data = |round| Data { seed: self.seed, size: index as u64, round };
        let (before, after) = (data(0), data(1));
        let doing = |activity| Event::Doing { activity, total_bytes };

        self.tell(doing(Activity::Check))?;
        let Self { setup, circle, track, rivals, compute, sink, group, .. } = self;
        let (options, gpu, stream) = (setup.options, track.gpu.clone(), Rc::clone(&track.stream));
        let mut tell = |event| if rank.0 == 0 { sink(event) } else { Ok(()) };
        let (mut entrants, mut reports) = (Vec::new(), Vec::new());
        for algorithm in setup.algorithms() {
            let way = Way { algorithm, captured: options.graph, traced: false };
            let prepared = ours::prepare(setup, group, &stream, shard_length, way)?;
            let memory = (prepared.input, prepared.report.outputs);
            let gatherer = prepared.gatherer;
            entrants.push(Entrant::open(gatherer, &gpu, &stream, memory, options.graph)?);
            reports.push(prepared.report);
        }
        for path in rivals.iter().flat_map(|rivals| rivals.paths()) {
            if let Some((gatherer, input)) = path.at(own.1, circle, options.in_place, &stream) {
                let memory = (vec![input], 1);
                let open = || Entrant::open(gatherer, &gpu, &stream, memory, options.graph);
                entrants.push(bounded("NCCL's first all-gather", circle.timeout(), open)?);
            }
        }
        for entrant in &mut entrants {
            entrant.guarded(|entrant| entrant.check(circle, setup.numbering(rank), before))?;
        }

        tell(doing(Activity::Measure))?;
        let times = time(track, circle, &mut entrants, counts)?;

        let mut besides = Vec::new();
        if let Some(compute) = compute {
            tell(doing(Activity::Beside))?;
            for entrant in &mut entrants {
                let work = |entrant: &mut Entrant<'_>| beside(track, circle, compute, entrant);
                besides.push(entrant.guarded(work)?);
            }
        }
        tell(doing(Activity::Check))?;
        for entrant in &mut entrants {
            entrant.guarded(|entrant| entrant.check(circle, setup.numbering(rank), after))?;
        }

        let starts = entrants[0].whole(counts.timed);
        // Those of the rivals go with the first row.
        let mut besides = besides.into_iter();
        let own_besides: Vec<_> = besides.by_ref().take(reports.len()).collect();
        for (index, report) in reports.iter().enumerate() {
            let predicted = setup.predicted(report);
            let mut row = row(setup, report, times[index], (limit, predicted), starts);
            if let Some(rivals) = rivals {
                let rivals_times = &times[reports.len()..];
                row.rivals = compare(rivals, times[index], rivals_times, row.total_bytes, ranks);
                row.rivals_version = Some(rivals.version().to_owned());
            }
            row.beside = own_besides.get(index).cloned().into_iter().collect();
            if index == 0 {
                row.beside.extend(besides.by_ref());
            }
            if let Some(text) = setup.explanation(report) {
                tell(Event::Note { text })?;
            }
            tell(Event::Row { row: Box::new(row) })?;
        }
        drop(entrants);
        // The next size is allocated when the memory of this one is free on every rank.
        Ok(self.group.barrier()?)
    }

    /// Traces a start at shards of so many elements. Collective.
    ///
    /// # Errors
    /// If it fails.
    pub(super) fn trace(&mut self, shard_length: u64) -> Result<()> {
        let total_bytes = self.total_bytes(shard_length);
        self.tell(Event::Doing { activity: Activity::Trace, total_bytes })?;
        let Self { setup, circle, group, .. } = self;
        let starts = of_dtype!(setup.options.dtype, T => {
            timeline::trace::<F, T>(setup, circle, group, shard_length)
        })?;
        self.tell(Event::Trace { starts })
    }

    fn total_bytes(&self, shard_length: u64) -> u64 {
        self.setup.shard_bytes(shard_length).iter().sum()
    }
}

fn counts(options: &Options, total_bytes: u64) -> Counts {
    let starts = if total_bytes < LARGE_BYTES { STARTS } else { STARTS_LARGE };
    let timed = options.iterations.unwrap_or(starts);
    Counts { warmup: options.warmup, timed, aligned: false }
}

/// The times of bare copies at shards of so many elements each, of the ways to copy the fastest.
/// Before anything else is prepared: the more streams there are, the more of them share the queues of
/// the device.
///
/// Many rounds in a row hide what a single one costs the host. Without flags the ranks come out of step
/// in them, and copies to one peer meet; so few rounds that begin together count as well. Collective.
///
/// # Errors
/// If a copy fails, or a rank is lost.
pub(super) fn limits(
    setup: &Setup<'_>,
    circle: &Circle,
    track: &mut Track,
    ground: &Ground,
    lengths: &[u64],
) -> Result<Vec<Duration>> {
    let (gpu, stream) = (track.gpu.clone(), Rc::clone(&track.stream));
    let limit = |&length: &u64| {
        let own = setup.own_bytes(length, circle.rank());
        let open = |(way, input)| Entrant::open(way, &gpu, &stream, (vec![input], 1), false);
        let ways = ground.ways(own, &stream).into_iter().map(open);
        let mut ways = ways.collect::<Result<Vec<_>>>()?;
        let total_bytes = setup.shard_bytes(length).iter().sum();
        let in_a_row = counts(setup.options, total_bytes);
        let warmup = in_a_row.warmup.max(1);
        let aligned = |timed| Counts { warmup, timed, aligned: true };
        let mut fastest = Duration::MAX;
        for counts in [in_a_row, aligned(1), aligned(4)] {
            let lap = |way: &mut Entrant<'_>| Ok(vec![track.lap(way, counts)?]);
            let times = laps(circle, &mut ways, lap)?;
            fastest = times.iter().map(|way| way[0].median).fold(fastest, Duration::min);
        }
        Ok(fastest)
    };
    lengths.iter().map(limit).collect()
}

/// The times of all, on the device and of the host. Collective.
fn time(
    track: &mut Track,
    circle: &Circle,
    entrants: &mut [Entrant<'_>],
    counts: Counts,
) -> Result<Vec<Times>> {
    let lap = |entrant: &mut Entrant<'_>| {
        Ok([track.lap(entrant, counts)?, track.host_time(entrant)?].into())
    };
    let times = laps(circle, entrants, lap)?;
    let times = times.iter().map(|times| Times { device: times[0], host: times[1].median });
    Ok(times.collect())
}

/// Laps of all, in turn, so that what disturbs one disturbs all alike: of each lap, which gives one or more
/// times, the longest of all ranks. Collective.
fn laps(
    circle: &Circle,
    entrants: &mut [Entrant<'_>],
    mut lap: impl FnMut(&mut Entrant<'_>) -> Result<Vec<Duration>>,
) -> Result<Vec<Vec<Statistics>>> {
    let mut own: Vec<Vec<Vec<Duration>>> = vec![Vec::new(); entrants.len()];
    for _ in 0..REPETITIONS {
        for (entrant, laps) in entrants.iter_mut().zip(&mut own) {
            laps.push(entrant.guarded(&mut lap)?);
        }
    }
    let ranks = circle.share("times", &own)?;
    let of = |entrant: usize| {
        let longest = |lap: usize, kind: usize| {
            ranks.iter().map(|rank| rank[entrant][lap][kind]).max().unwrap_or_default()
        };
        let kind = |kind| Statistics::of((0..REPETITIONS).map(|lap| longest(lap, kind)).collect());
        (0..own[entrant][0].len()).map(kind).collect()
    };
    Ok((0..own.len()).map(of).collect())
}

fn row(
    setup: &Setup<'_>,
    report: &Report,
    times: Times,
    (limit, predicted): (Option<Duration>, Option<Duration>),
    starts: u32,
) -> Row {
    let iterations = starts as usize * REPETITIONS;
    let figures = Figures { statistics: times.device, iterations, limit, predicted };
    let device = OnDevice {
        host_us: microseconds(times.host),
        starts_in_a_row: starts,
        captured: setup.options.graph,
        own_copy: setup.options.own_copy.name().to_owned(),
    };
    Row { device: Some(device), ..figures::row(setup, report, figures) }
}

/// The paths of NCCL, also those that it lacks; `times` are of those that it has.
fn compare(
    rivals: &Rivals,
    ours: Times,
    times: &[Times],
    total_bytes: u64,
    ranks: usize,
) -> Vec<Rival> {
    let ours = ours.device.median;
    let mut times = times.iter();
    let rival = |path: &super::rivals::Path| match path.refusal() {
        Some(why) => Rival::missing(path.name, why),
        None => times.next().map_or_else(
            || Rival::missing(path.name, "it was not timed"),
            |times| {
                let median = times.device.median;
                let busbw = bandwidths(Collective::AllGather, total_bytes, ranks, median).1;
                Rival::timed(path.name, median, ours, times.host, busbw)
            },
        ),
    };
    rivals.paths().iter().map(rival).collect()
}
