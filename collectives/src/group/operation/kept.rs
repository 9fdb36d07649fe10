//! Starts operations on a stream without a call of `prepare`, and keeps what was prepared for the next start.

use std::sync::Arc;

use peerlane_hal::Stream;

use super::builder::OperationBuilder;
use super::request::{OperationSpec, Target};
use super::{State, prepare};
use crate::element::Element;
use crate::error::Error;
use crate::group::window;

/// An operation that the group has prepared for starts without an [`Operation`](super::Operation).
pub(in crate::group) struct Kept {
    spec: OperationSpec,
    state: State,
}

impl Kept {
    pub(in crate::group) fn uses(&self, window: &Arc<window::Inner>) -> bool {
        let target = match &self.spec.target {
            Target::Window(inner, _) => Some(inner),
            Target::Buffers | Target::List(_) => None,
        };
        let source = self.spec.source.as_ref().map(|(inner, _)| inner);
        [target, source].into_iter().flatten().any(|inner| Arc::ptr_eq(inner, window))
    }
}

impl<T: Element> OperationBuilder<'_, T> {
    /// Enqueues the operation on the caller's stream, without a call of [`prepare`](Self::prepare). Collective.
    ///
    /// The first start of a description prepares it as [`capturable`](Self::capturable), and the group keeps it for the next
    /// starts. So the call works on a stream that is being captured: the ranks agree before anything is recorded, and replays run
    /// the prepared operation. The output must be in a window, and the input too unless the operation runs [in place](Self::in_place).
    ///
    /// Each further description is another operation that is kept, until its window is [released](crate::group::Group::release) or the group
    /// is closed. No graph with a start of it may be replayed after that. For places that change from start to start,
    /// prepare one [resizable](Self::resizable) operation.
    ///
    /// For order, deadline and progress see [`Operation::start_on`](super::Operation::start_on). The output is defined if the
    /// group [has not ended](crate::group::Group::abort_record) after the stream was synchronised.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) for the first start of a description;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if input or output is not in a window;
    /// as [`Operation::start_on`](super::Operation::start_on).
    pub fn start_on<S: Stream>(self, stream: &S) -> Result<(), Error> {
        let (group, spec) = self.into_kept();
        let known = group.kept.iter().position(|kept| same(&kept.spec, &spec));
        let index = match known {
            Some(index) => index,
            None => {
                let prepared = prepare::prepare(group, vec![spec.clone()])?;
                let state = prepared.into_iter().next().expect("one operation was prepared");
                group.kept.push(Kept { spec, state });
                group.kept.len() - 1
            }
        };
        group.kept[index].state.start_on(stream).map(drop)
    }
}

/// Returns whether two descriptions over windows have equal fields.
fn same(one: &OperationSpec, other: &OperationSpec) -> bool {
    let OperationSpec {
        collective,
        dtype,
        lens,
        target,
        method,
        in_place,
        outputs,
        capturable,
        needs_windows,
        any_engine,
        strict,
        traced,
        resizable,
        checks_starts,
        timeout,
        inputs,
        source,
        output_buffers,
    } = one;
    let place = |target: &Target| match target {
        Target::Window(inner, begin) => Some((Arc::as_ptr(inner), *begin)),
        Target::Buffers | Target::List(_) => None,
    };
    let begin = |(inner, begin): &(Arc<window::Inner>, usize)| (Arc::as_ptr(inner), *begin);
    let flags = [*in_place, *capturable, *needs_windows, *any_engine, *strict, *traced, *resizable];
    let other_flags = [
        other.in_place,
        other.capturable,
        other.needs_windows,
        other.any_engine,
        other.strict,
        other.traced,
        other.resizable,
    ];
    place(target).is_some()
        && place(target) == place(&other.target)
        && source.as_ref().map(begin) == other.source.as_ref().map(begin)
        && (collective, dtype, lens, method)
            == (&other.collective, &other.dtype, &other.lens, &other.method)
        && (outputs, timeout) == (&other.outputs, &other.timeout)
        && (flags, checks_starts) == (other_flags, &other.checks_starts)
        && [inputs, output_buffers, &other.inputs, &other.output_buffers]
            .iter()
            .all(|buffers| buffers.is_empty())
}
