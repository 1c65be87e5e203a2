/* kld/kld.h - the public header under the name that it is installed as, for programs that are
 * built in this tree as well as against an installed kld (client/examples). Not installed itself:
 * `make install` puts client/kld.h there. */
#include "client/kld.h"
