//! Measures collectives on host memory, over the host backend or over NICs.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::DynFabric;

use super::content::{self, Comparison};
use super::host_operation::HostOperation;
use super::limit::{Limit, LimitCopies};
use super::measure::{Bench, Candidates, Checked, Measurement, Point};
use super::printer::Activity;
use super::rank::RankContext;
use super::setup::Variant;
use super::target::Backend;
use super::timer::{Timing, TimingOptions};
use super::topology;
use crate::error::Result;
use crate::ranks::data::TestData;
use crate::ranks::statistics::longest_of_each;

struct HostBench {
    limit: Option<Limit>,
    timing_options: TimingOptions,
}

struct HostCandidate {
    operation: Box<dyn HostOperation>,
    block_length: u64,
}

pub(super) fn run(context: RankContext<'_>, backend: Backend) -> Result<()> {
    let (options, hosts) = (context.options, context.rank_topology.hosts);
    let limit_fabrics = limit_fabrics(&context, backend)?;
    let mut measurement = context.open(backend, None)?;
    let limit = match limit_fabrics.is_empty() {
        true => None,
        false => Some(Limit::open(limit_fabrics, &measurement.comm, hosts)?),
    };
    let timing_options = TimingOptions { warmup: options.warmup, iterations: options.iterations };
    let mut bench = HostBench { limit, timing_options };
    measurement.sweep(&mut bench)?;
    // Imported regions must be dropped before the peers free them.
    drop(bench);
    Ok(measurement.group.close()?)
}

/// Opens the fabrics whose bare copies are the limit. On the host, one copies through the cache,
/// the other with streaming stores.
fn limit_fabrics(context: &RankContext<'_>, backend: Backend) -> Result<Vec<DynFabric>> {
    let RankContext { options, comm, rank_topology, .. } = context;
    if !options.limit {
        return Ok(Vec::new());
    }
    let layer = options.node_options.throttle_inside();
    let open = |streaming_bytes_min| -> Result<DynFabric> {
        let mut fabrics = topology::fabric_options(options, rank_topology);
        fabrics.host.streaming_bytes_min = streaming_bytes_min;
        let fabric = fabrics.open(backend.in_library(), comm.rank(), comm.ranks())?;
        Ok(topology::throttled(fabric, layer))
    };
    match backend {
        Backend::Host => Ok(vec![open(Some(u64::MAX))?, open(Some(0))?]),
        _ => Ok(vec![open(None)?]),
    }
}

impl Bench for HostBench {
    type Candidate = HostCandidate;

    fn limit(&mut self, run: &mut Measurement<'_>, at: Point) -> Result<Option<Duration>> {
        let Some(limit) = &mut self.limit else { return Ok(None) };
        run.report_activity(Activity::Limit, at)?;
        let Measurement { setup, comm, group, .. } = run;
        let layout = setup.layout(at.block_length)?;
        let copies = LimitCopies { layout: &layout, in_place: setup.options.in_place };
        limit.measure(copies, self.timing_options, comm, group).map(Some)
    }

    fn prepare(
        &mut self,
        run: &mut Measurement<'_>,
        at: Point,
    ) -> Result<Candidates<HostCandidate>> {
        let (Measurement { setup, group, .. }, Point { block_length, .. }) = (run, at);
        let candidate = |algorithm| {
            let variant = Variant { algorithm, captured: false, traced: false };
            let operation = setup.prepare_on_host(group, block_length, variant)?;
            Ok(HostCandidate { operation, block_length })
        };
        let all = setup.algorithms().into_iter().map(candidate).collect::<Result<Vec<_>>>()?;
        let reports = all.iter().map(|candidate| candidate.operation.report().clone()).collect();
        Ok(Candidates { all, reports })
    }

    fn time(
        &mut self,
        run: &mut Measurement<'_>,
        candidates: &mut [HostCandidate],
        _at: Point,
    ) -> Result<Vec<Timing>> {
        let once = |candidate: &mut HostCandidate| candidate.operation.run();
        self.timing_options.time(&run.comm, &mut run.group, longest_of_each, candidates, once)
    }
}

impl Checked for HostCandidate {
    fn name(&self) -> &'static str {
        self.operation.report().algorithm.name()
    }

    fn check(&mut self, run: &Measurement<'_>, data: TestData) -> Result<Option<String>> {
        let (operation, block) = (&mut *self.operation, (run.comm.rank(), self.block_length));
        let mut found: Comparison = Ok(());
        // With two outputs each start fills the other one. After these starts every output has been
        // overwritten, filled and compared.
        for _ in 0..operation.report().outputs {
            content::fill(&run.setup, operation, block, data)?;
            operation.run()?;
            found = found.and(content::compare(&run.setup, operation, block, data)?);
        }
        Ok(found.err().map(|wrong| wrong.to_string()))
    }
}
