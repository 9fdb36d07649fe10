//! Forwards calls of a layer to its inner engine.

/// Defines methods of `CopyEngine` that call `self.engine` and wrap its error.
macro_rules! forward_to_engine {
    ($($method:ident)+) => { $($crate::forward::forward_to_engine!(=> $method);)+ };
    (=> caps) => {
        fn caps(&self) -> &peerlane_hal::Caps {
            self.engine.caps()
        }
    };
    (=> waker) => {
        fn waker(&self) -> std::task::Waker {
            self.engine.waker()
        }
    };
    (=> completed) => {
        fn completed(&mut self) -> Result<peerlane_hal::Ticket, Self::Error> {
            self.engine.completed().map_err($crate::Error::Inner)
        }
    };
    (=> park) => {
        fn park(&mut self, limit: std::time::Duration) -> Result<(), Self::Error> {
            self.engine.park(limit).map_err($crate::Error::Inner)
        }
    };
    (=> is_busy) => {
        fn is_busy(&self) -> bool {
            self.engine.is_busy()
        }
    };
    (=> release) => {
        fn release(&mut self) -> Result<(), Self::Error> {
            self.engine.release().map_err($crate::Error::Inner)
        }
    };
    (=> streams) => {
        fn is_capturing(&mut self, stream: &Self::Stream) -> Result<bool, Self::Error> {
            self.engine.is_capturing(stream).map_err($crate::Error::Inner)
        }

        fn fork(&mut self, from: &Self::Stream) -> Result<(), Self::Error> {
            self.engine.fork(from).map_err($crate::Error::Inner)
        }

        fn join(&mut self, into: &Self::Stream) -> Result<(), Self::Error> {
            self.engine.join(into).map_err($crate::Error::Inner)
        }
    };
}
pub(crate) use forward_to_engine;
