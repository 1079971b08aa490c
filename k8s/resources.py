"""ElasticJob's place in the API."""

from elastic.k8s.kernel.resources import Resource
from elastic.proto.elasticjob import GROUP, KIND, PLURAL, VERSION

ELASTICJOBS = Resource(group=GROUP, version=VERSION, kind=KIND, plural=PLURAL)
