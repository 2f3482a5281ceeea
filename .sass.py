import sys; sys.path.insert(0,'.')
import importlib.util, subprocess, tempfile, re, collections, os
spec=importlib.util.spec_from_file_location('c','.c.py'); c=importlib.util.module_from_spec(spec); spec.loader.exec_module(c)
from fastlayers.moe.fused_moe.launch_config import LaunchConfig, Tile
import triton
nv=os.path.join(os.path.dirname(triton.__file__),'backends/nvidia/bin')
for f,s in [((4,2048,4,1),(16,256,4,9)),((2,2048,4,1),(16,256,4,9))]:
    for b in c.builds(LaunchConfig(Tile(0,*f),Tile(0,*s))):
        k=c.compiled_for(b); open('/tmp/k.cubin','wb').write(k.asm['cubin'])
        out=subprocess.run([nv+'/nvdisasm','-c','/tmp/k.cubin'],capture_output=True,text=True).stdout
        ops=[]
        for l in out.splitlines():
            m=re.search(r'/\*[0-9a-f]{4,}\*/\s+(@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)',l)
            if m: ops.append(m.group(2))
        print(b.name,f,s,len(ops)); cnt=collections.Counter(o.split('.')[0] if not o.startswith(('F2F','LDG','HADD')) else o for o in ops); print(cnt.most_common(28))
        # runs of loads
        seq='';run=0
        line=[]
        for o in ops:
            if o.startswith('LDG'): line.append('L')
            elif o.startswith('FFMA'): line.append('f')
            elif o.startswith('SHFL'): line.append('s')
            elif o.startswith('BAR'): line.append('B')
            elif o.startswith('ACQBULK') or 'DEPBAR' in o: line.append('W')
            elif o.startswith('F2FP'): line.append('c')
        t=''.join(line); t=re.sub(r'(.)\1*',lambda m:m.group(1)+(str(len(m.group(0))) if len(m.group(0))>1 else ''),t); print(t[:1500])
