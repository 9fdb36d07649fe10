//! Starts operations on a stream without a call of `prepare`, and keeps what was prepared for the
//! next start.

use peerlane_hal::Stream;

use super::builder::OperationBuilder;
use super::request::OperationSpec;
use super::{State, prepare};
use crate::error::Error;
use crate::group::window::Inner;

/// An operation that the group has prepared for starts without an [`Operation`](super::Operation).
pub(in crate::group) struct Kept {
    spec: OperationSpec,
    state: State,
}

impl Kept {
    pub(in crate::group) fn uses(&self, window: &Inner) -> bool {
        self.state.windows.iter().flatten().any(|used| **used == *window)
    }
}

impl<T> OperationBuilder<'_, T> {
    /// Enqueues the operation on the caller's stream, without a call of [`prepare`](Self::prepare).
    /// Collective.
    ///
    /// The first start of a description prepares it, and the group keeps it for the next starts.
    /// With [`capturable`](Self::capturable), the call also works on a stream that is being
    /// captured: the ranks agree before anything is recorded, and replays run the prepared
    /// operation. The output must be in a window, and so must the input unless the operation runs
    /// [in place](Self::in_place).
    ///
    /// Each further description is another operation that is kept, until its window is
    /// [released](crate::group::Group::release) or the group is closed or dropped. For places that
    /// change from start to start, prepare one [resizable](Self::resizable) operation.
    ///
    /// For order, deadline and progress see [`Operation::start_on`](super::Operation::start_on).
    /// The output is defined if the group [has not ended](crate::group::Group::abort_record) after
    /// the stream was synchronised.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare) for the first start of a description;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if input or output is not in a
    /// window; as [`Operation::start_on`](super::Operation::start_on).
    pub fn start_on<S: Stream>(self, stream: &S) -> Result<(), Error> {
        let (group, spec) = self.into_kept();

        let known = group.kept.iter().position(|kept| kept.spec == spec);
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
